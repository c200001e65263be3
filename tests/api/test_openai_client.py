"""The openai package, as people use it, against a real server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator

import openai
import pytest

from app.api.options import ApiOptions
from app.engine.service import Phase
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.fakes.engine import FakeEngine

ANSWER = "Hello from the fake engine."
HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(), ApiOptions(api_keys=("sesame",))) as server:
        yield server


@pytest.fixture
def engine(server: LiveServer) -> Iterator[FakeEngine]:
    yield server.engine
    server.engine.reset()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI)
    assert answer.choices[0].message.content == ANSWER and answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens == len(ANSWER)


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="fake", messages=HI, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    *chunks, last = client.chat.completions.create(model="fake", messages=HI, stream=True, stream_options=options)
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == len(ANSWER)
    assert all(chunk.usage is None for chunk in chunks)


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=HI, n=2) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [ANSWER, ANSWER]


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HI, logprobs=True, top_logprobs=2, max_tokens=3)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and "".join(entry.token for entry in content) == "Hel"
    assert all(len(entry.top_logprobs) == 2 for entry in content)


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["a", "b"], n=2, max_tokens=3, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["aHel", "aHel", "bHel", "bHel"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs is not None
    chunks = list(client.completions.create(model="fake", prompt="a", stream=True, max_tokens=3))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hel"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_embeddings(client: openai.OpenAI) -> None:
    packed = client.embeddings.create(model="fake", input=["ab", "c"], dimensions=4)
    plain = client.embeddings.create(model="fake", input=[[97, 98]], encoding_format="float")
    assert [len(item.embedding) for item in packed.data] == [4, 4]
    assert math.isclose(math.hypot(*packed.data[0].embedding), 1, rel_tol=1e-6)
    assert len(plain.data[0].embedding) == 8


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve(model.id).id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"


def test_wrong_key(server: LiveServer) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("stream", [False, True])
def test_errors_of_requests(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 9000}], stream=stream)
    assert caught.value.code == "context_length_exceeded" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=HI, temperature=5, stream=stream)
    assert caught.value.param == "temperature"


def test_a_full_queue(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.capacity = 0
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="fake", messages=HI)
    assert caught.value.response.headers["retry-after"] == "3"


def test_the_client_retries_while_the_model_loads(server: LiveServer, engine: FakeEngine) -> None:
    engine.set_status(phase=Phase.LOADING, seconds_left=0.0)
    seen: list[int] = []

    def note(response: object) -> None:
        seen.append(response.status_code)  # type: ignore[attr-defined]
        engine.set_status(phase=Phase.READY)

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=1) as client:
        client._client.event_hooks["response"].append(note)
        answer = client.chat.completions.create(model="fake", messages=HI)
    assert seen == [503, 200] and answer.choices[0].message.content == ANSWER


def test_an_error_inside_a_stream(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fail_with, engine.fail_after = RuntimeError("words"), 3
    text = ""
    with pytest.raises(openai.APIError) as caught:
        for chunk in client.chat.completions.create(model="fake", messages=HI, stream=True):
            text += chunk.choices[0].delta.content or ""
    assert text == ANSWER[:3] and caught.value.code == "internal_error"


def test_closing_a_stream_frees_its_slot(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.gate.close()
    stream = client.chat.completions.create(model="fake", messages=HI, stream=True)
    engine.gate.step(2)
    next(iter(stream))
    stream.close()
    assert engine.abort_seen.wait(WAIT_S) and engine.idle()


def test_a_client_that_gives_up_waiting_frees_its_slot(client: openai.OpenAI, engine: FakeEngine) -> None:
    engine.gate.close()
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="fake", messages=HI, timeout=0.3)
    assert engine.abort_seen.wait(WAIT_S) and engine.idle()


def test_extras_of_llama_server(client: openai.OpenAI, engine: FakeEngine) -> None:
    extra = {"top_k": 3, "min_p": 0.2, "return_tokens": True, "chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(model="fake", messages=HI, max_tokens=2, extra_body=extra)
    assert engine.requests[-1].sampling.top_k == 3
    assert answer.choices[0].model_extra is not None and answer.choices[0].model_extra["tokens"] == [72, 101]
    assert answer.model_extra is not None and answer.model_extra["timings"]["predicted_n"] == 2


async def test_many_at_once(server: LiveServer) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        assert await asyncio.gather(*(one() for _ in range(20))) == [ANSWER] * 20
