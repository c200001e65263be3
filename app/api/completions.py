"""POST /v1/completions: text goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.api.body import JsonRoute
from app.api.choice import Choice
from app.api.completion_format import CompletionChunks, Echo, completion_answer
from app.api.constraints import check
from app.api.context import Api, ApiDep
from app.api.docs import GENERATING, answers
from app.api.fim import fim_tokens
from app.api.generation import Running, choice_ids, new_id
from app.api.journal import note
from app.api.params import Wanted, completion_params
from app.api.prompt import check_fits, checked_ids, prompt_tokens
from app.api.pump import streamed
from app.api.schemas.answers import TextCompletion, TextCompletionChunk
from app.api.schemas.completions import CompletionRequest
from app.api.shape import Shape, shape_of
from app.engine.request import GenerateRequest
from app.errors import InvalidParameter

router = APIRouter(route_class=JsonRoute, tags=["completions"])


@router.post("/v1/completions", **answers(TextCompletion, GENERATING, event=TextCompletionChunk))
@router.post("/completions", include_in_schema=False)
async def completions(request: Request, body: CompletionRequest, api: ApiDep) -> Response:
    """Continue each prompt; choice `prompt * n + i` is the i-th of its prompt."""
    api.check_model(body.model)
    params, prompts = await api.in_thread(lambda: understood(body, api))
    shape = shape_of(
        body,
        api,
        id=new_id("cmpl"),
        object="text_completion",
        n_prompt=sum(len(prompt.tokens) for prompt in prompts),
        n_top=params.sampling.n_logprobs,
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )
    running = Running.submit(api, shape.id, requests_of(prompts, params, shape, echo=bool(body.echo)))
    echoes = [prompt.echo if body.echo else None for prompt in prompts]
    if body.stream:
        return streamed(running, shape, api, lambda i: CompletionChunks(shape, i, echoes[i // params.n]), n=params.n)
    return await running.whole(request, lambda: whole_completion(running, shape, echoes))


async def whole_completion(running: Running, shape: Shape, echoes: Sequence[Echo | None]) -> Response:
    choices = await running.each(lambda i, stream: Choice(i, shape.tells_tokens).collect(stream))
    note(shape, choices)
    return JSONResponse(completion_answer(shape, choices, echoes))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt as tokens, and as it is echoed."""

    tokens: tuple[int, ...]
    echo: Echo


def understood(body: CompletionRequest, api: Api) -> tuple[Wanted, list[Prompt]]:
    """All about the request that may take long to find out."""
    params = completion_params(body, api)
    prompts = prompts_of(body, api)
    check(params.constraint, api)
    return params, prompts


def prompts_of(body: CompletionRequest, api: Api) -> list[Prompt]:
    """All prompts of the request; a list of numbers is one prompt."""
    given = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    many: Sequence[str | Sequence[int]] = given if several else [given]  # type: ignore[list-item, assignment]
    if body.suffix:
        if len(many) > 1 or not isinstance(many[0], str):
            raise InvalidParameter("suffix needs a prompt that is one string", param="suffix")
        tokens = fim_tokens(many[0], body.suffix, api, param="suffix")
        return [Prompt(tokens, Echo(many[0], len(tokens)))]
    return [prompt_of(one, api, f"prompt[{i}]" if several else "prompt") for i, one in enumerate(many)]


def prompt_of(given: str | Sequence[int], api: Api, where: str) -> Prompt:
    tokenizer = api.service.tokenizer
    if not isinstance(given, str):
        tokens = checked_ids(given, tokenizer, where)
        check_fits(tokens, api, param="prompt")
        return Prompt(tokens, Echo(tokenizer.decode(tokens, show_special=True), 0))
    tokens = prompt_tokens(given, api, param="prompt")
    check_fits(tokens, api, param="prompt")
    if not tokens:
        raise InvalidParameter("an empty prompt has no tokens to go on from", param=where)
    own_bos = tokens[0] == tokenizer.bos and not given.startswith(tokenizer.decode(tokens[:1], show_special=True))
    return Prompt(tokens, Echo(given, int(own_bos)))


def requests_of(prompts: Sequence[Prompt], params: Wanted, shape: Shape, *, echo: bool) -> list[GenerateRequest]:
    """The choices of all prompts, in the order of their indices."""
    requests: list[GenerateRequest] = []
    for i, prompt in enumerate(prompts):
        ids = choice_ids(shape.id, params.n, i * params.n)
        requests += params.requests(prompt.tokens, ids, prompt_logprobs=echo and shape.n_top is not None)
    return requests
