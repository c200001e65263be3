"""Clients besides openai's own that people use, against a real server. Each test skips where its package is absent.

`pip install tandem-llm[clients]` brings them; they are many megabytes, so they are no part of the development tools.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.api.options import ApiOptions
from tests.api.live import WAIT_S, LiveServer, live_server
from tests.fakes.engine import FakeEngine

ANSWER = "Hello from the fake engine."
KEY = "sesame"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore"),  # what these packages warn of is theirs
]


@pytest.fixture(scope="module", autouse=True)
def no_leaks() -> None:
    """Instead of the check of that name: some of these packages keep threads and sockets as long as they live."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(), ApiOptions(api_keys=(KEY,))) as server:
        yield server


@pytest.fixture
def engine(server: LiveServer) -> Iterator[FakeEngine]:
    yield server.engine
    server.engine.reset()


class TestLangChain:
    @pytest.fixture
    def model(self, server: LiveServer) -> Any:
        langchain_openai = pytest.importorskip("langchain_openai")
        return langchain_openai.ChatOpenAI(
            model="fake", base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=WAIT_S, stream_usage=True
        )

    def test_invoke(self, model: Any) -> None:
        answer = model.invoke("hi")
        assert answer.content == ANSWER
        assert answer.usage_metadata["output_tokens"] == len(ANSWER)
        assert answer.response_metadata["finish_reason"] == "stop"

    def test_stream(self, model: Any) -> None:
        whole = None
        for chunk in model.stream("hi"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None and whole.content == ANSWER
        assert whole.usage_metadata["output_tokens"] == len(ANSWER)
        assert whole.response_metadata["finish_reason"] == "stop"

    def test_log_probabilities(self, model: Any) -> None:
        answer = model.bind(logprobs=True, top_logprobs=2, max_tokens=3).invoke("hi")
        assert [entry["token"] for entry in answer.response_metadata["logprobs"]["content"]] == ["H", "e", "l"]

    def test_conversation(self, model: Any, engine: FakeEngine) -> None:
        model.invoke(
            [("system", "Be brief."), ("human", "hi"), ("ai", "Hello"), ("human", [{"type": "text", "text": "x"}])]
        )
        text = engine.tokenizer.decode(engine.requests[-1].prompt, show_special=True)
        assert text.index("Be brief.") < text.index("Hello") < text.index("user\nx")

    def test_errors(self, model: Any) -> None:
        openai = pytest.importorskip("openai")
        with pytest.raises(openai.BadRequestError) as caught:
            model.invoke("x" * 9000)
        assert caught.value.code == "context_length_exceeded"

    def test_embeddings(self, server: LiveServer) -> None:
        langchain_openai = pytest.importorskip("langchain_openai")
        model = langchain_openai.OpenAIEmbeddings(
            model="fake", base_url=f"{server.url}/v1", api_key=KEY, check_embedding_ctx_length=False
        )
        assert [len(vector) for vector in model.embed_documents(["a", "b"])] == [8, 8]


class TestLlamaIndex:
    @pytest.fixture(params=[True, False], ids=["chat", "completion"])
    def model(self, request: pytest.FixtureRequest, server: LiveServer) -> Any:
        package = pytest.importorskip("llama_index.llms.openai_like")
        return package.OpenAILike(
            model="fake",
            api_base=f"{server.url}/v1",
            api_key=KEY,
            is_chat_model=request.param,
            context_window=4096,
            max_tokens=100,
            max_retries=0,
        )

    def test_complete(self, model: Any) -> None:
        assert model.complete("hi").text == ANSWER
        *_, last = model.stream_complete("hi")
        assert last.text == ANSWER

    def test_chat(self, model: Any) -> None:
        message = pytest.importorskip("llama_index.core.llms").ChatMessage(role="user", content="hi")
        assert model.chat([message]).message.content == ANSWER
        *_, last = model.stream_chat([message])
        assert last.message.content == ANSWER


class TestLiteLLM:
    @pytest.fixture
    def options(self, server: LiveServer) -> dict[str, Any]:
        return {"model": "openai/fake", "api_base": f"{server.url}/v1", "api_key": KEY, "num_retries": 0}

    @pytest.fixture
    def litellm(self) -> Any:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it fetches a price list otherwise
        return pytest.importorskip("litellm")

    messages = [{"role": "user", "content": "hi"}]

    def test_completion(self, litellm: Any, options: dict[str, Any]) -> None:
        answer = litellm.completion(messages=self.messages, **options)
        assert answer.choices[0].message.content == ANSWER and answer.usage.completion_tokens == len(ANSWER)

    def test_stream(self, litellm: Any, options: dict[str, Any]) -> None:
        stream = litellm.completion(
            messages=self.messages, stream=True, stream_options={"include_usage": True}, **options
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
        assert chunks[-1].usage.completion_tokens == len(ANSWER)

    def test_thoughts(self, litellm: Any, options: dict[str, Any], engine: FakeEngine) -> None:
        answer = litellm.completion(messages=self.messages, logprobs=True, top_logprobs=1, max_tokens=2, **options)
        assert len(answer.choices[0].logprobs.content) == 2

    def test_embedding(self, litellm: Any, options: dict[str, Any]) -> None:
        answer = litellm.embedding(input=["a", "b"], **options)
        assert [len(item["embedding"]) for item in answer.data] == [8, 8]

    def test_errors_have_its_own_classes(self, litellm: Any, options: dict[str, Any], engine: FakeEngine) -> None:
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(messages=[{"role": "user", "content": "x" * 9000}], **options)
        with pytest.raises(litellm.AuthenticationError):
            litellm.completion(messages=self.messages, **{**options, "api_key": "wrong"})
        engine.capacity = 0
        with pytest.raises(litellm.RateLimitError):
            litellm.completion(messages=self.messages, **options)


class TestLlm:
    """The command line of that name."""

    @pytest.fixture
    def run(self, server: LiveServer, tmp_path: Path) -> Any:
        pytest.importorskip("llm")
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: fake\n  model_name: fake\n  api_base: {server.url}/v1\n  api_key_name: fake\n"
        )
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}

        def run(*args: str) -> str:
            command = [sys.executable, "-m", "llm", "-m", "fake", "--key", KEY, *args]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        return run

    @pytest.mark.parametrize("flags", [[], ["--no-stream"]])
    def test_prompt(self, run: Any, flags: list[str]) -> None:
        assert run("hi", *flags).strip() == ANSWER
