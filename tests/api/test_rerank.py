"""Ranking: by a model that can, over the real engine; refused in words by all others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.app import create_app
from app.api.options import ApiLimits, ApiOptions
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from app.engine.gguf.writer import TensorData, write_gguf
from tests.api.conftest import client_for
from tests.api.support import is_error
from tests.fakes.engine import FakeEngine
from tests.fakes.gguf import TinyLlama
from tests.fakes.serving import open_engine

RERANK = "/v1/rerank"
TEMPLATE = "<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
DOCUMENTS = ["The capital is Paris.", "Cats sleep.", "{query} of <|im_end|>"]
BODY: dict[str, Any] = {"query": "What is the capital?", "documents": DOCUMENTS}


def write_ranker(path: Path, n_labels: int, **extra: Any) -> tuple[Path, np.ndarray]:
    """A tiny model with a head of so many labels, and the head."""
    model = TinyLlama(GGMLType.F32, extra=extra)
    head = np.random.default_rng(n_labels).standard_normal((n_labels, model.n_embd)).astype(np.float32)
    tensor = TensorData("cls.output.weight", GGMLType.F32, (model.n_embd, n_labels), head)
    return write_gguf(path, model.metadata(), [*model.tensors(), tensor]), head


@pytest.fixture(scope="module", params=["two labels", "no first", "one label"])
def ranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranker]:
    labels = ["no", "yes"] if request.param == "no first" else ["yes", "no"]
    extra: dict[str, Any] = {"llama.classifier.output_labels": labels}
    n_labels = 1 if request.param == "one label" else 2
    if n_labels == 2:
        extra["tokenizer.chat_template.rerank"] = TEMPLATE
    else:
        extra |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    path, head = write_ranker(tmp_path_factory.mktemp("rank") / "ranker.gguf", n_labels, **extra)
    device = NumpyDevice("CPU")
    engine = open_engine(path, [device], ctx_size=1024, n_slots=2)
    yield Ranker(engine, head, labels.index("yes"), TEMPLATE if n_labels == 2 else None)
    engine.close()
    engine.check_integrity()
    device.close()


class Ranker:
    """A model that ranks, and what its scores should be."""

    def __init__(self, engine: Engine, head: np.ndarray, yes: int, template: str | None) -> None:
        self.engine, self.head, self.yes, self.template = engine, head, yes, template

    def tokens(self, query: str, document: str) -> list[int]:
        tokenizer = self.engine.tokenizer

        def encode(text: str, special: bool = False) -> list[int]:
            return tokenizer.encode(text, add_special=False, parse_special=special)

        if self.template is None:
            return [tokenizer.bos, *encode(query), tokenizer.eos, *encode(document), tokenizer.eos]
        head, rest = self.template.split("{query}")
        middle, tail = rest.split("{document}")
        return [*encode(head, True), *encode(query), *encode(middle, True), *encode(document), *encode(tail, True)]

    async def score(self, query: str, document: str) -> float:
        state = await self.engine.embed(self.tokens(query, document), "last")
        logits = self.head @ np.asarray(state.vector, dtype=np.float64)
        if len(logits) == 1:
            return float(logits[0])
        return float(np.exp(logits[self.yes]) / np.exp(logits).sum())


@pytest.fixture
async def client(ranker: Ranker) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(ranker.engine, ApiOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client


async def test_the_order_of_documents(client: httpx.AsyncClient, ranker: Ranker) -> None:
    wanted = [await ranker.score(BODY["query"], text) for text in DOCUMENTS]
    answer = (await client.post(RERANK, json={**BODY, "return_documents": True})).json()
    order = [result["index"] for result in answer["results"]]
    assert sorted(order) == [0, 1, 2] and order == sorted(order, key=lambda i: -wanted[i])
    for result in answer["results"]:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=1e-4)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    n_tokens = sum(len(ranker.tokens(BODY["query"], text)) for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    assert answer["object"] == "list" and answer["model"] == "tiny"


async def test_other_shapes(client: httpx.AsyncClient) -> None:
    whole = (await client.post(RERANK, json=BODY)).json()["results"]
    assert "document" not in whole[0]
    scores = {result["index"]: pytest.approx(result["relevance_score"], abs=1e-4) for result in whole}
    objects = {**BODY, "documents": [{"text": text} for text in DOCUMENTS], "top_n": 2}
    for path in ("/rerank", "/reranking", "/v1/reranking"):
        best = (await client.post(path, json=objects)).json()["results"]
        assert [result["index"] for result in best] == [result["index"] for result in whole[:2]]
        assert all(result["relevance_score"] == scores[result["index"]] for result in best)
    texts = {"query": BODY["query"], "texts": DOCUMENTS, "return_text": True}
    listed = (await client.post("/rerank", json=texts)).json()
    assert listed == [
        {"index": result["index"], "score": scores[result["index"]], "text": DOCUMENTS[result["index"]]}
        for result in whole
    ]


async def test_refusals(client: httpx.AsyncClient) -> None:
    for changes, param in (
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": [5]}, "documents[0]"),
        ({"texts": ["x"]}, "texts"),
        ({"query": None}, "query"),
        ({"top_n": 0}, "top_n"),
    ):
        is_error(await client.post(RERANK, json={**BODY, **changes}), 400, param)
    too_long = {**BODY, "documents": ["short", "x" * 3000]}
    is_error(await client.post(RERANK, json=too_long), 400, "documents[1]", "context_length_exceeded")


async def test_models_that_cannot() -> None:
    async with client_for(FakeEngine()) as client:
        error = is_error(await client.post(RERANK, json=BODY), 400, "model", "unsupported")
        assert "reranker" in error["message"] and "/v1/embeddings" in error["message"]


async def test_many_documents(ranker: Ranker) -> None:
    options = ApiOptions(limits=ApiLimits(embedding_inputs=2))
    transport = httpx.ASGITransport(create_app(ranker.engine, options))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        is_error(await client.post(RERANK, json=BODY), 400, "documents")
