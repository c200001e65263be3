from __future__ import annotations

import pytest

from app.engine.text.templates import ChatTemplate
from app.engine.text.turns import TurnMarks
from tests.engine.text.vocabularies import TINY, metadata_of, tiny


@pytest.mark.parametrize("name", TINY)
def test_turns_begin_where_their_special_token_stands(name: str) -> None:
    tokenizer = tiny(name)
    template = ChatTemplate.from_metadata(metadata_of(f"tiny-{name}"), tokenizer)
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    tokens = tokenizer.encode_prompt(template.render(messages))
    starts = TurnMarks(template, tokenizer).starts(tokens)
    beginnings = [tokenizer.decode(tokens[:start]).replace(" ", "") for start in starts]
    if name == "llama-yarn-Q8_0":  # its vocabulary has no token that opens a turn
        assert starts == ()
        return
    for said, words in (("one", "one"), ("two", "two")):
        assert any(text.rstrip().endswith(words) for text in beginnings), said
    shorter = tokenizer.encode_prompt(template.render(messages[:1], add_generation_prompt=False))
    assert len(shorter) in starts
    assert tokens[: len(shorter)] == shorter


def test_a_template_without_special_tokens_has_no_marks() -> None:
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    assert TurnMarks(ChatTemplate(plain), tiny("qwen2-Q8_0")).starts([1, 2, 3]) == ()
    refusing = ChatTemplate("{{ raise_exception('no') }}")
    assert TurnMarks(refusing, tiny("qwen2-Q8_0")).starts([1, 2, 3]) == ()
