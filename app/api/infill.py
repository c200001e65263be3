"""POST /infill: what editors ask when they complete code."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.choice import Choice
from app.api.constraints import check
from app.api.context import Api, ApiDep
from app.api.docs import GENERATING, answers
from app.api.fim import fim_tokens
from app.api.generation import Running, choice_ids, new_id
from app.api.journal import note
from app.api.native_format import NativeChunks, native_answer
from app.api.params import Wanted, infill_params
from app.api.pump import streamed
from app.api.schemas.answers import Infill, InfillChunk
from app.api.schemas.completions import InfillRequest
from app.api.shape import Shape, shape_of

router = APIRouter(route_class=JsonRoute, tags=["completions"])


@router.post("/infill", **answers(Infill | list[Infill], GENERATING, event=InfillChunk))
@router.post("/v1/infill", include_in_schema=False)
async def infill(request: Request, body: InfillRequest, api: ApiDep) -> Response:
    """Fill the hole between a prefix and a suffix. The answer has llama-server's own shape, without an end mark."""
    api.check_model(body.model)
    params, prompt = await api.in_thread(lambda: understood(body, api))
    shape = shape_of(
        body, api, id=new_id("infill"), object="infill", n_prompt=len(prompt), n_top=params.sampling.n_logprobs
    )
    running = Running.submit(api, shape.id, params.requests(prompt, choice_ids(shape.id, params.n)))
    if body.stream:
        return streamed(running, shape, api, lambda i: NativeChunks(shape, i), n=params.n, done=b"")
    return await running.whole(request, lambda: whole_infill(running, shape))


def understood(body: InfillRequest, api: Api) -> tuple[Wanted, tuple[int, ...]]:
    """All about the request that may take long to find out."""
    params = infill_params(body, api)
    prompt = fim_tokens(
        body.input_prefix,
        body.input_suffix,
        api,
        param="input_prefix",
        typed=body.prompt or "",
        extra=body.input_extra or (),
    )
    check(params.constraint, api)
    return params, prompt


async def whole_infill(running: Running, shape: Shape) -> Response:
    choices = await running.each(lambda i, stream: Choice(i, shape.tells_tokens).collect(stream))
    note(shape, choices)
    answers = [native_answer(shape, choice) for choice in choices]
    return JSONResponse(answers[0] if len(answers) == 1 else answers)
