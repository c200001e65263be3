from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.text.fields import Field
from app.engine.text.reasoning import FORMATS, ReasoningFormat, format_of, reasoning_parser

BY_NAME = {family.name: family for family in FORMATS}
TAGGED = [family for family in FORMATS if family.name != "harmony"]
HARMONY_PROMPT = "<|start|>user<|message|>hi<|end|><|start|>assistant"


def parse(
    family: ReasoningFormat | None,
    chunks: list[str] | str,
    prompt: str = "",
    *,
    has_tools: bool = False,
    inside: bool = False,
) -> dict[Field, str]:
    """All text by field."""
    parser = reasoning_parser(family, prompt, has_tools=has_tools, inside=inside)
    fields: dict[Field, str] = {}
    for pieces in [*(parser.push(chunk) for chunk in chunks), parser.finish()]:
        for field, text in pieces:
            assert text
            fields[field] = fields.get(field, "") + text
    return fields


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_thoughts_and_answer_part_at_the_tags(family: ReasoningFormat) -> None:
    text = f"\n{family.opening}\n\nI think, so\nI am.\n{family.closing}\n\n The answer.\n"
    for chunks in ([text], list(text)):
        assert parse(family, chunks) == {Field.REASONING: "I think, so\nI am.", Field.CONTENT: "The answer.\n"}


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_a_prompt_that_opened_the_thought_leaves_only_the_closing_tag(family: ReasoningFormat) -> None:
    prompt = f"<user>hi</user><assistant>{family.opening}"
    assert parse(family, f"hm{family.closing}yes", prompt) == {Field.REASONING: "hm", Field.CONTENT: "yes"}


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_a_prompt_that_closed_the_thought_leaves_content(family: ReasoningFormat) -> None:
    prompt = f"<assistant>{family.opening}\n\n{family.closing}\n\n"
    assert parse(family, "yes", prompt) == {Field.CONTENT: "yes"}


def test_a_thought_that_the_client_began_goes_on() -> None:
    assert parse(BY_NAME["think"], "so on</think>42", "<think>I begin and ", inside=True) == {
        Field.REASONING: "so on",
        Field.CONTENT: "42",
    }


def test_white_space_alone_is_no_thought() -> None:
    assert parse(BY_NAME["think"], "<think>\n\n</think>\n\nHi") == {Field.CONTENT: "Hi"}


def test_a_thought_cut_short_is_a_thought() -> None:
    assert parse(BY_NAME["think"], "<think>never en</thi") == {Field.REASONING: "never en</thi"}


def test_an_answer_without_a_thought_is_unchanged() -> None:
    for text in (" plain\n", "<b>bold</b>", "<thin", "later <think>is text</think>"):
        assert parse(BY_NAME["think"], list(text)) == {Field.CONTENT: text}


def test_a_call_ends_a_thought_only_where_there_are_tools() -> None:
    text = "<think>I call\n<tool_call>{}</tool_call>"
    assert parse(BY_NAME["think"], list(text), has_tools=True) == {
        Field.REASONING: "I call",
        Field.CONTENT: "<tool_call>{}</tool_call>",
    }
    assert parse(BY_NAME["think"], list(text)) == {Field.REASONING: "I call\n<tool_call>{}</tool_call>"}


def test_special_tags_may_open_a_second_thought_behind_content() -> None:
    family = BY_NAME["gemma4"]
    text = "<|channel>thought\na<channel|>b<|channel>thought\nc<channel|>d"
    for chunks in ([text], list(text)):
        assert parse(family, chunks) == {Field.REASONING: "ac", Field.CONTENT: "bd"}


def test_no_family_means_all_is_content() -> None:
    assert parse(None, "<think>x</think>y") == {Field.CONTENT: "<think>x</think>y"}


def test_pieces_leave_as_soon_as_they_are_certain() -> None:
    parser = reasoning_parser(BY_NAME["think"], "<think>\n")
    assert parser.push("so ") == [(Field.REASONING, "so")]
    assert parser.push("far <") == [(Field.REASONING, " far")]
    assert parser.push("/x>") == [(Field.REASONING, " </x>")]
    assert parser.push("</think>") == []
    assert parser.push("\n") == []
    assert parser.push("\nyes") == [(Field.CONTENT, "yes")]


@settings(max_examples=200)
@given(data=st.data())
def test_how_the_text_is_cut_makes_no_difference(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FORMATS))
    atoms = st.sampled_from(
        [family.opening, family.closing, *family.call_starts, " ", "\n", "a", "<", "<|end|>", "<|start|>assistant"]
        + ["analysis", "final", " to=functions.f", "<|message|>", "<|channel|>"] * (family.name == "harmony")
    )
    text = "".join(data.draw(st.lists(atoms, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(family, [text], has_tools=True)
    assert parse(family, chunks, has_tools=True) == whole
    assert parse(family, list(text), has_tools=True) == whole


def test_harmony_messages_go_to_their_fields() -> None:
    text = (
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    for chunks in ([text], list(text)):
        assert parse(BY_NAME["harmony"], chunks, HARMONY_PROMPT) == {
            Field.REASONING: "think",
            Field.CONTENT: "I look.\n\nDone.",
        }


def test_harmony_calls_are_kept_raw() -> None:
    call = " to=functions.f<|channel|>commentary json<|message|>{}"
    assert parse(BY_NAME["harmony"], list(call), HARMONY_PROMPT) == {Field.CALL: call}
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}"
    assert parse(BY_NAME["harmony"], list(text), HARMONY_PROMPT) == {
        Field.REASONING: "hm",
        Field.CALL: "<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}",
    }


def test_harmony_goes_on_where_a_prefill_ended() -> None:
    prompt = f"{HARMONY_PROMPT}<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>An old"
    assert parse(BY_NAME["harmony"], [" pond"], prompt) == {Field.CONTENT: " pond"}


def test_harmony_without_headers_is_content() -> None:
    for text in ("Hello there", "assistant", "commentary on all this: " + "x" * 300):
        assert parse(BY_NAME["harmony"], list(text), HARMONY_PROMPT) == {Field.CONTENT: text}


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ '<think>' }}", "think"),
        ("{% if '</think>' in content %}", "think"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("[SYSTEM_PROMPT][THINK]", "mistral"),
        ("{{ message.content }}", None),
    ],
)
def test_families_are_known_by_their_templates(source: str, name: str | None) -> None:
    family = format_of(source)
    assert (family.name if family else None) == name
