from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pytest

from app.engine.text.builtin_templates import BUILTIN_TEMPLATES
from app.engine.text.templates import ChatTemplate
from app.engine.text.tokenizer import Tokenizer
from app.errors import InvalidParameter, ModelError, RequestError
from tests.engine.text.vocabularies import vocabulary

NOSYS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn here') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must take turns') }}{% endif %}[{{ m.role }}] {{ m.content }}{% endfor %}"
)
MAPPING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}(call {{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}){% endfor %}{% endfor %}[assistant]"
)
THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content | trim }}</think>"
    "{% endif %}{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ SHOWN }}{% endfor %}{% endfor %}"


def user(text: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": arguments}}


def test_an_instruction_moves_into_the_user_turn_where_there_is_no_system_role() -> None:
    template = ChatTemplate(NOSYS, "<s>")
    text = template.render([system("Answer in French."), user()])
    assert text == "<s><user>Answer in French.\nHi</user><assistant>"


def test_a_refusal_carries_the_template_s_own_words() -> None:
    template = ChatTemplate(ALTERNATING)
    for messages in ([user(), user()], [assistant("x"), user()]):
        with pytest.raises(InvalidParameter, match="turns must take turns"):
            template.render(messages)


@pytest.mark.parametrize("message", [{"content": "x"}, {"role": "", "content": "x"}, {"role": 5, "content": "x"}])
def test_a_message_needs_a_role(message: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ChatTemplate(NOSYS).render([user(), message])
    assert caught.value.param == "messages[1].role"


def test_a_user_message_needs_content_and_an_answer_does_not() -> None:
    template = ChatTemplate(MAPPING)
    for role in ("user", "system"):
        with pytest.raises(InvalidParameter, match="must be text"):
            template.render([{"role": role, "content": None}])
    texts = {
        template.render([user(), {**answer, "tool_calls": [call('{"k": "v"}')]}, {"role": "tool", "content": "42"}])
        for answer in (assistant(None), assistant(""), {"role": "assistant"})
    }
    assert texts == {"[user]Hi[assistant](call lookup k=v)[tool]42[assistant]"}


def test_an_answer_that_has_not_begun_is_left_out() -> None:
    template = ChatTemplate(NOSYS)
    assert template.render([user(), assistant("")]) == template.render([user()])


def test_arguments_become_objects_or_text_as_the_template_wants_them() -> None:
    as_text = CALLS.replace("SHOWN", "c.function.arguments + '!'")
    for arguments in ('{"k": "é"}', {"k": "é"}):
        messages = [user(), assistant("", tool_calls=[call(arguments)]), {"role": "tool", "content": "1"}]
        assert ChatTemplate(as_text).render(messages) == '{"k": "é"}!'
        assert "k=é" in ChatTemplate(MAPPING).render(messages)


def test_arguments_that_are_no_json_stay_as_the_model_wrote_them() -> None:
    source = CALLS.replace("SHOWN", "c.function.arguments | tojson")
    messages = [user(), assistant("", tool_calls=[call("{broken")]), {"role": "tool", "content": "1"}]
    assert ChatTemplate(source).render(messages) == '"{broken"'


def test_parts_are_joined_for_templates_that_take_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<user>a\nb</user>" in ChatTemplate(NOSYS).render([user(parts)])
    with pytest.raises(InvalidParameter, match="text parts only"):
        ChatTemplate(NOSYS).render([user([{"type": "image_url", "image_url": {"url": "x"}}])])


def test_text_is_wrapped_for_templates_that_take_parts_only() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    template = ChatTemplate(source)
    assert template.capabilities.list_only
    assert template.render([system("S"), user("U"), assistant("A ")]) == "<system>S<user>U<assistant>A "


def test_developer_is_system_where_a_template_does_not_know_it() -> None:
    template = ChatTemplate(BUILTIN_TEMPLATES["chatml"])
    developer = {"role": "developer", "content": "Be brief."}
    assert template.render([developer, user()]) == template.render([system("Be brief."), user()])
    knows = "{% for m in messages %}{{ '#D ' if m.role == 'developer' else '#O ' }}{{ m.content }}{% endfor %}"
    assert ChatTemplate(knows).render([developer, user()]) == "#D Be brief.#O Hi"


def test_later_instructions_are_kept_where_they_stand() -> None:
    only_first = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first only') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(only_first)
    text = template.render([system("A"), system("B"), user("1"), assistant("2"), system("C"), user("3")])
    assert text == "<system>A\n\nB<user>1<assistant>2<user>C\n3"
    assert template.render([user("1"), system("C")]) == "<user>1<user>C"


def test_a_final_answer_is_continued_exactly() -> None:
    template = ChatTemplate(THINKING)
    assert template.render([user(), assistant("  An old ")]) == "<user>Hi</user><assistant><think></think>  An old "
    assert (
        template.render([user(), assistant("so", reasoning_content="hm ")])
        == "<user>Hi</user><assistant><think>hm </think>so"
    )
    assert template.render([user(), assistant("", reasoning_content="hm ")]) == "<user>Hi</user><assistant><think>hm "


def test_a_final_answer_may_be_a_turn_like_any_other() -> None:
    template = ChatTemplate(NOSYS)
    assert template.render([user(), assistant("A")], continue_final_message=False) == (
        "<user>Hi</user><assistant>A</assistant><assistant>"
    )


def test_a_final_answer_that_the_template_hides_cannot_be_continued() -> None:
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(RequestError, match="cannot be continued"):
        template.render([user(), assistant("A")])


def test_thoughts_reach_templates_under_the_name_they_look_for() -> None:
    source = "{% for m in messages %}{% if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}{% endfor %}"
    messages = [user("1"), assistant("2", reasoning_content="hm"), user("3")]
    assert ChatTemplate(source).render(messages) == "1(hm)23"
    with_call = [user("1"), assistant("2", reasoning="hm", tool_calls=[call({})]), {"role": "tool", "content": "3"}]
    assert ChatTemplate(source).render(with_call) == "1(hm\n\n2)3"


def test_variables_reach_the_template_and_some_under_more_names() -> None:
    source = "{{ reasoning_strength }} {{ preserve_thinking }} {{ clear_thinking }} {{ own.x }}"
    text = ChatTemplate(source).render([user()], reasoning_effort="low", preserve_reasoning=True, own={"x": 1})
    assert text == "low True False 1"


def test_dates_come_from_the_clock_that_is_given() -> None:
    source = "{{ strftime_now('%Y-%m-%d') if strftime_now is defined else '-' }} {{ date_string }}"
    noon = datetime(2026, 2, 3, 12)
    assert ChatTemplate(source).render([user()], now=noon) == "2026-02-03 03 Feb 2026"
    assert ChatTemplate(source, clock=lambda: noon).render([user()]) == "2026-02-03 03 Feb 2026"
    assert ChatTemplate(source).render([user()]) == "- "


def test_templates_may_change_lists_without_touching_what_they_were_given() -> None:
    messages = [user("a")]
    source = "{% set l = [] %}{% for m in messages %}{{ l.append(m.content) or '' }}{% endfor %}"
    template = ChatTemplate(source + "{{ messages.pop().content }}{{ l }}")
    assert template.render(messages) == template.render(messages) == "a['a']"
    assert messages == [user("a")]


def test_generation_blocks_render_their_body() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% set x = 1 %}{% endgeneration %}{{ x }}|{% endfor %}"
    )
    assert ChatTemplate(source).render([user("a"), user("b")]) == "a|b|"


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a' }", "{% if x %}", "{{ x | nofilter }}", "{{" + "(" * 5000])
def test_what_is_no_template_is_refused_when_it_is_loaded(source: str) -> None:
    with pytest.raises(ModelError, match="chat template cannot be used"):
        ChatTemplate(source)


def test_values_that_are_no_json_are_refused() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    for content in (object(), deep):
        with pytest.raises(InvalidParameter):
            ChatTemplate(NOSYS).render([{"role": "user", "content": "x", "extra": content}])


def small_tokenizer(**keys: Any) -> Tokenizer:
    return Tokenizer.from_metadata(vocabulary("llama", ["<unk>", "<s>", "</s>", "a"], scores=[0.0] * 4, **keys))


def test_a_file_s_template_is_used_and_knows_its_ends() -> None:
    metadata = {"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ messages[0].content }}"}
    assert ChatTemplate.from_metadata(metadata, small_tokenizer()).render([user()]) == "<s></s>Hi"


def test_a_file_without_a_template_speaks_chatml() -> None:
    template = ChatTemplate.from_metadata({}, small_tokenizer())
    assert template.render([user()]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_of_its_own_serves_tools() -> None:
    metadata = {"tokenizer.chat_template": b"plain", "tokenizer.chat_template.tool_use": "{{ tools | tojson }}"}
    template = ChatTemplate.from_metadata(metadata, small_tokenizer())
    assert template.render([user()]) == "plain"
    assert json.loads(template.render([user()], tools=[{"type": "function"}])) == [{"type": "function"}]
    broken = ChatTemplate.from_metadata(
        {**metadata, "tokenizer.chat_template.tool_use": "{% for %}"}, small_tokenizer()
    )
    assert broken.render([user()], tools=[{"type": "function"}]) == "plain"


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("source", ["{{ bos_token }}a", "<s>a", "a"])
def test_a_prompt_begins_with_bos_at_most_once(source: str, add_bos: bool) -> None:
    tokenizer = small_tokenizer(add_bos_token=add_bos, add_space_prefix=False, token_type=[2, 3, 3, 1])
    text = ChatTemplate.from_metadata({"tokenizer.chat_template": source}, tokenizer).render([user()])
    wanted = add_bos or source != "a"
    assert tokenizer.encode_prompt(text) == ([1, 3] if wanted else [3])
