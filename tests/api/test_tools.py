"""Tools: told to the model, found in its answers, and called when they must be."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from app.api.app import create_app
from app.api.options import ApiOptions
from app.engine.devices.numpy import NumpyDevice
from app.engine.engine import Engine
from app.engine.ggml import GGMLType
from tests.api.conftest import client_for
from tests.api.support import ANY_PARAM, CHAT, HI, is_error, joined, stream
from tests.fakes.engine import CHATML, FakeEngine
from tests.fakes.gguf import TinyLlama, write_tiny_llama
from tests.fakes.serving import open_engine

ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/digit"}, "b": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"add": ADD, "time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD, "strict": True}},
    {"type": "function", "function": {"name": "time", "parameters": TIME}},
]
NAMED = {"type": "function", "function": {"name": "time"}}

#: Shows tools and calls as Qwen's does.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}{{ t | tojson }}{% endfor %}\n"
    "<tool_call>{{ '{' }}name, arguments{{ '}' }}</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TWO = (
    'Let me see.\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {"zone": "UTC"}}\n</tool_call>'
)
WANTED = [("add", {"a": 2, "b": 3}), ("time", {"zone": "UTC"})]


def calls_in(events: list[Any]) -> list[dict[str, Any]]:
    """The calls that a stream's deltas add up to; checks their shape."""
    calls: list[dict[str, Any]] = []
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else []:
            for entry in choice["delta"].get("tool_calls", ()):
                if entry["index"] == len(calls):
                    assert entry["type"] == "function" and entry["id"] and entry["function"]["name"]
                    calls.append({"id": entry["id"], "type": "function", "function": dict(entry["function"])})
                else:
                    assert set(entry) == {"index", "function"} and set(entry["function"]) == {"arguments"}
                    assert entry["index"] == len(calls) - 1
                    calls[-1]["function"]["arguments"] += entry["function"]["arguments"]
    return calls


def told(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def finish(events: list[Any]) -> str:
    (reason,) = [c["finish_reason"] for e in events if e != "[DONE]" for c in e["choices"] if c["finish_reason"]]
    return reason


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 2}, {"return_tokens": True}], ids=str)
async def test_two_calls_whole_and_streamed(more: dict[str, Any]) -> None:
    body = {"messages": HI, "tools": TOOLS, **more}
    async with client_for(FakeEngine(template=HERMES, reply=lambda request: TWO)) as client:
        choice = (await client.post(CHAT, json=body)).json()["choices"][0]
        events = await stream(client, CHAT, body)
    assert choice["finish_reason"] == finish(events) == "tool_calls"
    assert choice["message"]["content"] == joined(events) == "Let me see."
    assert told(choice["message"]["tool_calls"]) == told(calls_in(events)) == WANTED
    if "logprobs" in more:
        entries = [c["logprobs"]["content"] for e in events[:-1] for c in e["choices"] if c["logprobs"]]
        assert len(sum(entries, [])) == len(choice["logprobs"]["content"]) == len(TWO.encode())


async def test_arguments_stream_token_by_token() -> None:
    text = "a long note, " * 9
    reply = '<tool_call>\n{"name": "time", "arguments": {"zone": "' + text + '"}}\n</tool_call>'
    async with client_for(FakeEngine(template=HERMES, reply=lambda request: reply)) as client:
        events = await stream(client, CHAT, {"messages": HI, "tools": TOOLS})
    entries = [e for event in events[:-1] for c in event["choices"] for e in c["delta"].get("tool_calls", ())]
    assert len(entries) > len(text) and max(len(entry["function"]["arguments"]) for entry in entries) < 8
    assert told(calls_in(events)) == [("time", {"zone": text})]


async def test_only_calls_have_no_content() -> None:
    reply = TWO.removeprefix("Let me see.\n\n")
    async with client_for(FakeEngine(template=HERMES, reply=lambda request: reply)) as client:
        message = (await client.post(CHAT, json={"messages": HI, "tools": TOOLS})).json()["choices"][0]["message"]
    assert message["content"] is None and told(message["tool_calls"]) == WANTED


async def test_at_most_one_call() -> None:
    body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
    async with client_for(FakeEngine(template=HERMES, reply=lambda request: TWO)) as client:
        choice = (await client.post(CHAT, json=body)).json()["choices"][0]
        events = await stream(client, CHAT, body)
    assert told(choice["message"]["tool_calls"]) == told(calls_in(events)) == WANTED[:1]


async def test_tools_of_no_use() -> None:
    engine = FakeEngine(template=HERMES, reply=lambda request: "Just words.")
    async with client_for(engine) as client:
        for choice in ("none", "auto"):
            body = {"messages": HI, "tools": TOOLS, "tool_choice": choice}
            answer = (await client.post(CHAT, json=body)).json()["choices"][0]
            assert answer["message"]["content"] == "Just words." and "tool_calls" not in answer["message"]
            assert answer["finish_reason"] == "stop"
    without, shown = (engine.tokenizer.decode(request.prompt) for request in engine.requests)
    assert "Adds." in shown and "Adds." not in without


async def test_calls_of_tools_that_may_not_be_called_are_not_heard() -> None:
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "none"}
    async with client_for(FakeEngine(template=HERMES, reply=lambda request: TWO)) as client:
        choice = (await client.post(CHAT, json=body)).json()["choices"][0]
        events = await stream(client, CHAT, body)
    assert choice["message"]["content"] == joined(events) == "Let me see."
    assert "tool_calls" not in choice["message"] and not calls_in(events)
    assert choice["finish_reason"] == finish(events) == "stop"


async def test_an_answer_that_looks_like_a_call_is_an_answer_where_none_may_be() -> None:
    looks = '{"name": "add", "arguments": {}}'
    body = {"messages": HI, "tools": TOOLS, "tool_choice": "none"}
    form = {"response_format": {"type": "json_object"}}
    for template, more in ((CHATML, {}), (HERMES, form), (TEMPLATES["llama3"], form)):
        async with client_for(FakeEngine(template=template, reply=lambda request: looks)) as client:
            choice = (await client.post(CHAT, json={**body, **more})).json()["choices"][0]
        assert choice["message"]["content"] == looks and "tool_calls" not in choice["message"]


async def test_thoughts_before_calls() -> None:
    reply = "<think>\nhm\n</think>\n\n" + TWO
    async with client_for(FakeEngine(template=HERMES + "{# <think> #}", reply=lambda request: reply)) as client:
        body = {"messages": HI, "tools": TOOLS}
        message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
        events = await stream(client, CHAT, body)
    assert message["reasoning_content"] == joined(events, name="reasoning_content") == "hm"
    assert message["content"] == joined(events) == "Let me see."
    assert told(message["tool_calls"]) == told(calls_in(events)) == WANTED


async def test_gpt_oss() -> None:
    template = CHATML + "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{# <|channel|>analysis #}"
    reply = (
        '<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add '
        '<|constrain|>json<|message|>{"a": 2, "b": 3}'
    )  # fmt: skip
    for reasoning_format, thought in (("auto", "hm"), ("none", "hm")):
        body = {"messages": HI, "tools": TOOLS, "reasoning_format": reasoning_format}
        async with client_for(FakeEngine(template=template, reply=lambda request: reply)) as client:
            message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
            events = await stream(client, CHAT, body)
        assert told(message["tool_calls"]) == told(calls_in(events)) == WANTED[:1]
        assert message["reasoning_content"] == thought and not message["content"]


async def test_a_template_without_tools_is_told_of_them_in_words() -> None:
    engine = FakeEngine(reply=lambda request: '{"tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}')
    system = {"role": "system", "content": "Be brief."}
    async with client_for(engine) as client:
        body = {"messages": [system, *HI], "tools": TOOLS}
        message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
    assert told(message["tool_calls"]) == WANTED[:1]
    prompt = engine.tokenizer.decode(engine.requests[0].prompt)
    assert '"name": "time"' in prompt and "Be brief." in prompt


async def test_results_go_back_with_and_without_ids() -> None:
    engine = FakeEngine(template=HERMES)
    for call_id in ("c1", None):
        call = {"id": call_id, "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        messages = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call_id, "content": "5"},
        ]
        async with client_for(engine) as client:
            response = await client.post(CHAT, json={"messages": messages, "tools": TOOLS})
            assert response.status_code == 200, response.text
    one, other = (engine.tokenizer.decode(request.prompt) for request in engine.requests)
    assert one == other and "\n5" in one and "None" not in one and "null" not in one.lower()


async def test_ids_are_as_the_template_wants_them() -> None:
    strict = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}" + (
        "{{ raise_exception('ids must have nine characters') }}{% endif %}{% endfor %}{% endfor %}"
    )
    template = strict + HERMES.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", "")
    reply = '[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}[TOOL_CALLS]time[ARGS]{"zone": "UTC"}'
    async with client_for(FakeEngine(template=template, reply=lambda request: reply)) as client:
        message = (await client.post(CHAT, json={"messages": HI, "tools": TOOLS})).json()["choices"][0]["message"]
        assert told(message["tool_calls"]) == WANTED
        for ids in (True, False):
            calls = [call if ids else {**call, "id": None} for call in message["tool_calls"]]
            history = [*HI, {**message, "tool_calls": calls}, {"role": "tool", "content": "5"}]
            assert (await client.post(CHAT, json={"messages": history, "tools": TOOLS})).status_code == 200


async def test_a_form_beside_calls_that_must_be(caller: httpx.AsyncClient) -> None:
    """There is no text that could have the form; what is wrong with it is told all the same."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [7, 8]}}}
    body = {**HOT, "tool_choice": NAMED, "response_format": form, "seed": 1}
    choice = (await caller.post(CHAT, json=body)).json()["choices"][0]
    assert [name for name, _ in told(choice["message"]["tool_calls"])] == ["time"] and not choice["message"]["content"]


async def test_a_wrong_form_beside_calls_that_must_be(client: httpx.AsyncClient) -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}
    for more in ({"response_format": bad}, {"guided_regex": "a"}):
        for choice in ("required", NAMED):
            body = {"messages": HI, "tools": TOOLS, "tool_choice": choice, **more}
            is_error(await client.post(CHAT, json=body), 400, next(iter(more)))


@pytest.mark.parametrize(("field", "value"), [("functions", [{"name": "f"}]), ("function_call", {"name": "f"})])
async def test_older_fields_name_what_took_their_place(client: httpx.AsyncClient, field: str, value: Any) -> None:
    error = is_error(await client.post(CHAT, json={"messages": HI, field: value}), 400, field)
    assert ("tools" if field == "functions" else "tool_choice") in error["message"]
    neutral: Any = [] if field == "functions" else "auto"
    assert (await client.post(CHAT, json={"messages": HI, field: neutral})).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, ANY_PARAM),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
    ],
)
async def test_refused(client: httpx.AsyncClient, fields: dict[str, Any], param: str) -> None:
    for streamed in (False, True):
        is_error(await client.post(CHAT, json={"messages": HI, "stream": streamed, **fields}), 400, param)


async def test_parameters_that_cannot_be_held_to_are_named(client: httpx.AsyncClient) -> None:
    tool = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"x": {"not": {}}}}}}
    error = is_error(
        await client.post(CHAT, json={"messages": HI, "tools": [*TOOLS, tool], "tool_choice": "required"}),
        400,
        "tools.odd.parameters",
    )
    assert "not" in error["message"] and "tools.odd.parameters" in error["message"]
    assert (await client.post(CHAT, json={"messages": HI, "tools": [tool]})).status_code == 200


# -- a real engine, whose random model calls because it must -------------------------------------------------------

#: Templates by family, as far as detection looks at them.
TEMPLATES = {
    "hermes": HERMES,
    "coder": HERMES.replace("<tool_call>{{ '{' }}", "<tool_call>\n<function=f>{{ '{' }}"),
    "llama3": HERMES.replace("<tool_call>", "").replace("</tool_call>", "") + "{# <|python_tag|> #}",
    "mistral": HERMES.replace("<tool_call>", "[TOOL_CALLS]").replace("</tool_call>", ""),
    "deepseek": HERMES.replace("<tool_call>", "<｜tool▁call▁begin｜>").replace("</tool_call>", ""),
    "glm": HERMES.replace("{{ '{' }}name, arguments{{ '}' }}", "<arg_key>"),
    "kimi": HERMES.replace("<tool_call>", "<|tool_calls_section_begin|>").replace("</tool_call>", ""),
    "dsml": HERMES.replace("<tool_call>", "<｜DSML｜function_calls>").replace("</tool_call>", ""),
    "minimax": HERMES.replace("<tool_call>", "<minimax:tool_call>").replace("</tool_call>", ""),
    "gemma4": HERMES.replace("<tool_call>", "<|tool_call>").replace("</tool_call>", ""),
    "generic": CHATML,
}
HOT = {"messages": HI, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 1200, "tools": TOOLS}


@pytest.fixture(scope="module")
def engine_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_tiny_llama(tmp_path_factory.mktemp("tools") / "tiny.gguf", TinyLlama(GGMLType.F16))
    device = NumpyDevice("CPU")
    engine = open_engine(path, [device], ctx_size=8192, n_slots=4, max_queue=64)
    yield engine
    engine.close()
    engine.check_integrity()
    device.close()


SLOW = ("coder", "mistral", "deepseek", "kimi", "dsml", "minimax")


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in TEMPLATES])
async def caller(engine_file: Engine, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    template, engine_file.template = engine_file.template, FakeEngine(template=TEMPLATES[request.param]).template
    transport = httpx.ASGITransport(create_app(engine_file, ApiOptions()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
        yield client
    engine_file.template = template


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_the_model_calls_when_it_must(caller: httpx.AsyncClient, choice: Any) -> None:
    for seed in range(2):
        body = {**HOT, "tool_choice": choice, "parallel_tool_calls": bool(seed % 2), "seed": seed}
        answer = (await caller.post(CHAT, json=body)).json()["choices"][0]
        events = await stream(caller, CHAT, body)
        calls = told(answer["message"]["tool_calls"])
        assert told(calls_in(events)) == calls and finish(events) == answer["finish_reason"] == "tool_calls"
        assert not answer["message"]["content"] and joined(events) == ""
        assert len(calls) == 1 or (seed % 2 and choice == "required")
        for name, arguments in calls:
            assert choice == "required" or name == "time"
            jsonschema.Draft202012Validator(SCHEMAS[name]).validate(arguments)


async def test_calls_or_an_answer_of_the_form(caller: httpx.AsyncClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": [7, 8]}}}
    for seed, bias in ((0, [["7", 20], ["8", 20]]), (1, [["<", 20], ["{", 20], ["[", 20]])):
        body = {**HOT, "response_format": form, "logit_bias": bias, "seed": seed, "parallel_tool_calls": False}
        choice = (await caller.post(CHAT, json=body)).json()["choices"][0]
        if seed == 0:
            assert choice["message"]["content"] in ("7", "8") and choice["finish_reason"] == "stop"
        else:
            assert len(told(choice["message"]["tool_calls"])) == 1 and choice["finish_reason"] == "tool_calls"
