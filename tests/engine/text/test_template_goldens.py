"""Prompts and pieces of Jinja, against those of an independent engine and of the reference renderer."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.engine.text.builtin_templates import BUILTIN_TEMPLATES, patched
from app.engine.text.templates import ChatTemplate
from app.errors import RequestError
from tests.support import goldens_dir

FILES = (
    "smollm2-135m",
    "gemma3-270m",
    "gemma3-270m-builtin-gemma",
    "own-tools",
    "upstream-Qwen-Qwen2.5-7B-Instruct",
    "upstream-Qwen-Qwen3-0.6B",
    "upstream-Qwen3-Coder",
    "upstream-Qwen3.5-4B",
    "upstream-google-gemma-2-2b-it",
    "upstream-meta-llama-Llama-3.1-8B-Instruct",
    "upstream-openai-gpt-oss-120b",
)

BUILTIN = {"gemma3-270m": "chatml", "gemma3-270m-builtin-gemma": "gemma"}

#: Where the reference loses an instruction or refuses a conversation because of where instructions stand, and every
#: one of them is in the prompt here: what has to be in it.
KEPT: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("upstream-Qwen3.5-4B", "two_system"): ("system\nA\n\nB<", "user\nC<"),
    ("upstream-Qwen3.5-4B", "system_late"): ("user\nA<", "user\nB\nC<"),
    ("upstream-google-gemma-2-2b-it", "two_system"): ("user\nA\n\nB\nC<",),
    ("upstream-google-gemma-2-2b-it", "only_system"): ("user\nAlone<",),
    ("upstream-openai-gpt-oss-120b", "two_system"): ("A\n\nB", "user<|message|>C"),
    ("upstream-openai-gpt-oss-120b", "system_late"): ("user<|message|>A", "user<|message|>B\nC"),
    ("gemma3-270m-builtin-gemma", "developer_role"): ("user\nDev\n\nHi<",),
}


@cache
def chat_golden(name: str) -> dict[str, Any]:
    return dict(json.loads((goldens_dir() / "chat" / f"{name}.json").read_text(encoding="utf-8")))


@cache
def template_texts() -> dict[str, str]:
    """Templates of TANDEM_TEMPLATES, a directory of *.jinja files, by the hash of what the reference made of them."""
    texts = {}
    for path in Path(os.environ.get("TANDEM_TEMPLATES", os.devnull)).glob("*.jinja"):
        text = path.read_text(encoding="utf-8")
        for form in (text, text.rstrip("\n"), patched(text), patched(text).rstrip("\n")):
            texts[hashlib.sha256(form.encode()).hexdigest()] = text
    return texts


@cache
def template_of(name: str) -> ChatTemplate:
    golden = chat_golden(name)
    if name in BUILTIN:
        source = BUILTIN_TEMPLATES[BUILTIN[name]]
    elif "template" in golden:
        source = golden["template"]
    elif golden["template_sha256"] in template_texts():
        source = template_texts()[golden["template_sha256"]]
    else:
        pytest.skip("this golden holds the template's hash only; set TANDEM_TEMPLATES to a directory that has it")
    return ChatTemplate(source, "<|im_start|>", "<|im_end|>")


def render(name: str, request: Mapping[str, Any]) -> str:
    now = datetime.fromisoformat(chat_golden(name).get("rendered_on", "2000-01-01"))
    messages = request["messages"]
    # The reference's formatter for Gemma is not a template, and closes a final answer instead of going on with it.
    closes = name == "gemma3-270m-builtin-gemma" and bool(messages) and messages[-1]["role"] == "assistant"
    return template_of(name).render(
        messages,
        tools=request.get("tools"),
        add_generation_prompt=request.get("add_generation_prompt", True) and not closes,
        continue_final_message=not closes,
        now=now,
        **request.get("chat_template_kwargs", {}),
    )


@pytest.mark.parametrize("name", FILES)
def test_every_request_has_the_golden_prompt(name: str) -> None:
    for result in chat_golden(name)["results"]:
        if (name, result["name"]) in KEPT:
            continue
        if result["status"] == 200:
            assert render(name, result["request"]) == result["prompt"], result["name"]
        else:
            with pytest.raises(RequestError):
                render(name, result["request"])


@pytest.mark.parametrize(("name", "request_name"), KEPT)
def test_no_instruction_is_lost_where_the_reference_loses_it(name: str, request_name: str) -> None:
    (result,) = (result for result in chat_golden(name)["results"] if result["name"] == request_name)
    text = render(name, result["request"])
    assert text != result.get("prompt")
    for words in KEPT[name, request_name]:
        assert words in text


def test_every_piece_of_jinja_comes_out_as_in_the_reference_renderer() -> None:
    golden = chat_golden("jinja")
    for case in golden["cases"]:
        text = ChatTemplate(case["template"]).render_raw(golden["messages"], **golden["variables"])
        assert text == case["jinja2"], case["name"]
