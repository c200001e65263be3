"""The public JSON-Schema-Test-Suite (draft 2020-12) against the grammars that schemas become.

Whatever compiles allows no text of a value that the suite calls invalid. What does not compile is refused by name. The
suite's cases are in `tests/data`, with their licence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.engine.grammar import Grammars
from app.engine.request import Constraint
from app.errors import InvalidParameter
from tests.fakes.engine import FakeTokenizer

SUITE: dict[str, list[dict[str, Any]]] = json.loads(
    (Path(__file__).parents[1] / "data" / "json_schema_suite.json").read_text()
)
#: Keywords that no grammar of ours holds to. A schema that has one of them is refused.
REFUSED = {
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$anchor",
    "$dynamicAnchor", "$vocabulary",
}  # fmt: skip
#: Files about what we promise, and the cases in each that are refused all the same, with a word that says why.
PROMISED: dict[str, dict[str, str]] = {
    "additionalProperties": {
        "additionalProperties with propertyNames": "propertyNames",
        "dependentSchemas with additionalProperties": "dependentSchemas",
    },
    "allOf": {"allOf with boolean schemas, some false": "false", "allOf with boolean schemas, all false": "false"},
    "anyOf": {"anyOf with boolean schemas, all false": "false"},
    "boolean_schema": {"boolean schema 'false'": "false"},
    "const": {},
    "default": {},
    "enum": {"empty enum": "anyOf is empty"},
    "exclusiveMaximum": {},
    "exclusiveMinimum": {},
    "items": {},
    "maxItems": {},
    "maxLength": {},
    "maxProperties": {},
    "maximum": {},
    "minItems": {},
    "minLength": {},
    "minProperties": {},
    "minimum": {},
    "multipleOf": {"float division = inf": "multipleOf"},
    "pattern": {},
    "patternProperties": {
        "multiple simultaneous patternProperties are validated": "disjoint",
        "patternProperties with boolean schemas": "disjoint",
        "regexes are not anchored by default and are case sensitive": "disjoint",
    },
    "prefixItems": {},
    "properties": {},
    "required": {},
    "type": {},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return FakeTokenizer()


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Grammars:
    return Grammars(tokenizer)


def constraint(schema: Any) -> Constraint:
    return Constraint(kind="json_schema", source=json.dumps(schema))


def allows(grammars: Grammars, tokenizer: Any, schema: Any, value: Any) -> bool:
    """Whether an answer may be this value, written plainly."""
    matcher = grammars.matcher(constraint(schema))
    data = json.dumps(value, ensure_ascii=False).encode()
    for i, token in enumerate(data):
        mask = matcher.mask()
        if not mask[token >> 3] >> (token & 7) & 1:
            return False
        if matcher.push(token):
            return i == len(data) - 1
    mask = matcher.mask()
    return any(mask[token >> 3] >> (token & 7) & 1 for token in tokenizer.eog)


def words_in(schema: Any) -> set[str]:
    """All keys, wherever they stand."""
    if isinstance(schema, dict):
        return set(schema).union(*map(words_in, schema.values()))
    return set().union(*map(words_in, schema)) if isinstance(schema, list) else set()


def refusal(grammars: Grammars, schema: Any) -> str | None:
    try:
        grammars.check(constraint(schema))
    except InvalidParameter as error:
        assert error.param == "response_format"
        return str(error)
    return None


@pytest.mark.parametrize("name", SUITE)
def test_nothing_invalid_is_allowed(grammars: Grammars, tokenizer: Any, name: str) -> None:
    for case in SUITE[name]:
        schema = case["schema"]
        reason = refusal(grammars, schema)
        if reason is None:
            wrong = [t["description"] for t in case["tests"] if not t["valid"]]
            allowed = {t["description"] for t in case["tests"] if allows(grammars, tokenizer, schema, t["data"])}
            assert not allowed & set(wrong), case["description"]


@pytest.mark.parametrize("name", PROMISED)
def test_what_is_promised_compiles_and_allows_what_is_valid(grammars: Grammars, tokenizer: Any, name: str) -> None:
    n_valid = n_allowed = 0
    for case in SUITE[name]:
        reason = refusal(grammars, case["schema"])
        known = PROMISED[name].get(case["description"])
        assert (reason is None) == (known is None), (case["description"], reason)
        if reason is not None and known is not None:
            assert known in reason
            continue
        valid = [t["data"] for t in case["tests"] if t["valid"]]
        n_valid += len(valid)
        n_allowed += sum(allows(grammars, tokenizer, case["schema"], value) for value in valid)
    # Numbers have one spelling, and properties one order: a value may be allowed in another writing than the suite's.
    assert n_allowed >= 0.7 * n_valid


@pytest.mark.parametrize("word", sorted(REFUSED - {"$anchor", "$dynamicAnchor", "$vocabulary", "$dynamicRef"}))
def test_what_is_not_promised_is_refused_by_name(grammars: Grammars, word: str) -> None:
    schemas = [case["schema"] for cases in SUITE.values() for case in cases if word in words_in(case["schema"])]
    reasons = [refusal(grammars, schema) for schema in schemas if isinstance(schema, dict) and word in schema]
    assert reasons and all(reasons)
    assert any(word in (reason or "") for reason in reasons)
