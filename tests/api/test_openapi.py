"""The OpenAPI document says what the server does: generated requests meet no bug and no surprise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from fastapi import FastAPI
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.api.app import create_app
from app.api.auth import PUBLIC_PATHS
from app.api.options import ApiOptions
from tests.api.live import LiveServer, live_server
from tests.fakes.engine import FakeEngine

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


OPTIONS = ApiOptions(enable_metrics=True)


def make_app() -> FastAPI:
    return create_app(FakeEngine(), OPTIONS)


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, verb, operation) for path, verbs in document["paths"].items() for verb, operation in verbs.items()]


def test_every_operation_says_what_it_answers() -> None:
    for path, verb, operation in operations(make_app().openapi()):
        where = f"{verb} {path}"
        assert operation["description"], where
        assert "422" not in operation["responses"] and "200" in operation["responses"], where
        for status, response in operation["responses"].items():
            assert response.get("content"), f"{where} {status}"
            assert not any(content.get("schema") == {} for content in response["content"].values()), f"{where} {status}"


def test_keys_are_in_the_document() -> None:
    document = create_app(FakeEngine(), ApiOptions(api_keys=("k",))).openapi()
    assert document["security"] == [{"bearer": []}, {"apiKey": []}]
    for path, _, operation in operations(document):
        assert ("401" in operation["responses"]) == (path not in PUBLIC_PATHS)
        assert (operation.get("security") == []) == (path in PUBLIC_PATHS)
    assert not any("401" in operation["responses"] for _, _, operation in operations(make_app().openapi()))


def test_names_resolve() -> None:
    document = make_app().openapi()
    text = str(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}'" in text, f"{name} is not used"
    assert "HTTPValidationError" not in text


DOCUMENT = make_app().openapi()
OPERATIONS = [(path, verb) for path, verb, _ in operations(DOCUMENT)]


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(FakeEngine(n_ctx=64), OPTIONS) as server:
        yield server


def try_requests(server: LiveServer, path: str, verb: str, n: int, mode: GenerationMode) -> None:
    """Send `n` generated requests, the same in every run, and check every answer against the document."""
    operation = schemathesis.openapi.from_dict(DOCUMENT)[path][verb.upper()]

    @hypothesis.settings(max_examples=n, deadline=None, derandomize=True, database=None)
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def try_one(case: schemathesis.Case) -> None:
        response = case.call(base_url=server.url, session=session)
        case.validate_response(response, checks=CHECKS)

    with requests.Session() as session:
        try_one()


@pytest.mark.parametrize(("path", "verb"), OPERATIONS)
def test_generated_requests(server: LiveServer, path: str, verb: str) -> None:
    try_requests(server, path, verb, 8, GenerationMode.POSITIVE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "verb"), [operation for operation in OPERATIONS if "{" not in operation[0] and operation[1] == "post"]
)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_many_generated_requests(server: LiveServer, path: str, verb: str, mode: GenerationMode) -> None:
    try_requests(server, path, verb, 25, mode)
