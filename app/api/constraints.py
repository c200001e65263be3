"""The form an answer must have, from every field that can say it: OpenAI's, llama-server's and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from app.api.context import Api
from app.api.prompt import ChatPrompt
from app.api.schemas.chat import ChatRequest, ResponseFormat
from app.api.schemas.sampling import GenerationFields
from app.engine.request import Constraint, Thought
from app.engine.text.call_grammar import harmony_answer
from app.engine.text.reasoning import ReasoningFormat
from app.errors import InvalidParameter

ANY_OBJECT = {"type": "object"}


def constraint_of(body: GenerationFields) -> Constraint | None:
    """The one form the request asks for. Raises InvalidParameter when it asks for two, or for one nobody knows."""
    found = list(_all(body))
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise InvalidParameter(f"{names} exclude each other; give one of them", param=found[-1].param)
    if not found:
        return None
    if body.ignore_eos:
        raise InvalidParameter("ignore_eos does not go with an answer that must end in time", param="ignore_eos")
    return found[0]


def check(constraint: Constraint | None, api: Api) -> None:
    """Compile it, which may take long; raises InvalidParameter for what cannot be held to."""
    if constraint is not None:
        api.service.grammars.check(constraint)


def in_messages(constraint: Constraint, prompt: ChatPrompt, api: Api) -> Constraint:
    """The constraint for a model whose answer is a row of messages with headers, the last of them for the reader."""
    if constraint.kind != "json_schema" or not prompt.text.endswith("<|start|>assistant"):
        raise InvalidParameter(
            f"{constraint.param} does not go with this model's message format; ask for a JSON schema",
            param=constraint.param,
            code="unsupported",
        )
    grammar = harmony_answer(constraint.source, constraint.param, api.marks)
    return Constraint(kind="lark", source=grammar, param=constraint.param)


def thought_of(family: ReasoningFormat | None, prompt: ChatPrompt) -> Thought | None:
    """What may stand before a constrained answer, unless the constraint itself tells of it."""
    if family is None or family.name == "harmony":
        return None
    is_open = prompt.in_thought or prompt.text.rstrip().endswith(family.opening.rstrip())
    return Thought(opening=family.opening, closing=family.closing, is_open=is_open)


def _all(body: GenerationFields) -> Iterator[Constraint]:
    if isinstance(body, ChatRequest) and body.response_format is not None:
        yield from _response_format(body.response_format)
    if body.json_schema is not None:
        yield _json(body.json_schema, "json_schema")
    if body.grammar:
        yield Constraint(kind="gbnf", source=body.grammar, param="grammar")
    for prefix, given in (("guided_", body), ("structured_outputs.", body.structured_outputs)):
        if given is None:
            continue
        for name, make in _GUIDED.items():
            value = getattr(given, f"guided_{name}" if given is body else {"json": "json_"}.get(name, name), None)
            if value is not None:
                yield make(value, prefix + name)
    if body.structured_outputs is not None and body.structured_outputs.json_object:
        yield _json(ANY_OBJECT, "structured_outputs.json_object")


def _response_format(given: ResponseFormat) -> Iterator[Constraint]:
    if given.type == "json_object":
        yield _json(ANY_OBJECT if given.schema_ is None else given.schema_, "response_format")
    elif given.type == "json_schema":
        schema = given.schema_ if given.json_schema is None else given.json_schema.schema_
        if schema is None:
            raise InvalidParameter(
                "response_format of type json_schema needs a schema",
                param="response_format.json_schema.schema",
            )
        yield _json(schema, "response_format")
    elif given.type != "text":
        raise InvalidParameter(
            f"response_format {given.type[:80]!r} is not known; use text, json_object or json_schema",
            param="response_format.type",
        )


def _json(schema: Any, param: str) -> Constraint:
    source = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Constraint(kind="json_schema", source=source, param=param)


def _regex(pattern: str, param: str) -> Constraint:
    return Constraint(kind="regex", source=pattern, param=param)


def _choice(choices: list[str], param: str) -> Constraint:
    if not choices or not all(choices):
        raise InvalidParameter(f"{param} needs at least one text, and none of them empty", param=param)
    alternatives = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
    return Constraint(kind="lark", source=f"start: {alternatives}", param=param)


def _grammar(source: str, param: str) -> Constraint:
    return Constraint(kind="gbnf" if "::=" in source else "lark", source=source, param=param)


_GUIDED: dict[str, Callable[[Any, str], Constraint]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
