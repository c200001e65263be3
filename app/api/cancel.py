"""POST /v1/cancel: stop a request by the id its answer carries."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from app.api.body import JsonRoute
from app.api.context import Api, ApiDep
from app.api.docs import LOOKING, READING, answers
from app.api.schemas.facts import Cancellation
from app.api.schemas.text import CancelRequest
from app.errors import NotFound

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/cancel", **answers(Cancellation, (*READING, 404)))
@router.post("/cancel", include_in_schema=False)
async def cancel(body: CancelRequest, api: ApiDep) -> dict[str, Any]:
    """Stop all choices of a running request. Whoever waits for it gets an error."""
    return cancel_by_id(body.id, api)


@router.post("/v1/cancel/{request_id}", **answers(Cancellation, (*LOOKING, 404)))
@router.post("/cancel/{request_id}", include_in_schema=False)
async def cancel_path(request_id: str, api: ApiDep) -> dict[str, Any]:
    """The same, with the id in the path."""
    return cancel_by_id(request_id, api)


def cancel_by_id(request_id: str, api: Api) -> dict[str, Any]:
    stop = api.cancels.get(request_id)
    if stop is None:
        raise NotFound(f"no request {request_id!r} is running", param="id", code="request_not_found")
    stop()
    return {"id": request_id, "object": "cancellation", "cancelled": True}
