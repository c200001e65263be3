"""/health, /healthz, /readyz: is it up, is it alive, can it answer now."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from app.api.context import ApiDep
from app.api.docs import LOOKING, answers
from app.api.errors import DEVICE_RETRY_S
from app.api.schemas.facts import Health, Liveness, Readiness
from app.engine.service import Phase, ServiceStatus

router = APIRouter(tags=["health"])


@router.get("/health", **answers(Health, LOOKING))
@router.get("/v1/health", include_in_schema=False)
async def health(api: ApiDep) -> Response:
    """200 once the model is loaded, also while a worker is away; 503 with the progress before that."""
    api.check_loaded()
    return JSONResponse({"status": "ok"})


@router.get("/", include_in_schema=False)
async def welcome() -> dict[str, str]:
    """Where to go from here, for who opens the URL itself; some agents knock here before they ask."""
    return {"name": "tandem", "api": "/v1", "docs": "/docs", "schema": "/openapi.json"}


@router.get("/healthz", **answers(Liveness, LOOKING[:2]))
async def healthz(api: ApiDep) -> dict[str, str]:
    """200 as long as the process answers."""
    return {"status": "alive", "phase": api.service.status().phase}


@router.get("/readyz", **answers(Readiness, LOOKING[:2], also={503: Readiness}))
async def readyz(api: ApiDep) -> Response:
    """200 if a request would be taken now; else 503 with what is missing."""
    status = api.service.status()
    ready = status.phase is Phase.READY
    headers = {} if ready else {"Retry-After": str(round(DEVICE_RETRY_S))}
    return JSONResponse(readiness(status), 200 if ready else 503, headers)


def readiness(status: ServiceStatus) -> dict[str, Any]:
    return {
        "status": "ready" if status.phase is Phase.READY else "not ready",
        "phase": status.phase,
        "detail": status.detail,
        "progress": status.progress,
        "eta_seconds": status.seconds_left,
        "lost_devices": list(status.lost_devices),
    }
