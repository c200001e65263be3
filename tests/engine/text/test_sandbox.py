"""Templates come from strangers: whatever one does, it ends soon, in bounded memory, and touches nothing."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator

import pytest

from app.engine.text.meter import Limits
from app.engine.text.templates import ChatTemplate
from app.errors import InvalidParameter, ModelError, RequestError

#: Small enough that each case takes a fraction of a second.
LIMITS = Limits(steps=60_000)

ENDLESS = {
    "a long loop": "{% for i in range(10**12) %}{% endfor %}",
    "loops in loops": "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    "a loop that skips all": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "a text times a number": "{{ 'a' * 10**9 }}",
    "a number times a text": "{{ 10**9 * 'a' }}",
    "a list times a number": "{{ [1] * 10**10 }}",
    "nested lists times a number": "{% set l = [[1] * 999] * 9999 %}{{ l * 9999 }}",
    "doubling a text": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "adding texts": "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "doubling a list": "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "a list that holds itself twice": (
        "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}"
    ),
    "a dict that holds itself twice": (
        "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = {'a': n.s, 'b': n.s} %}{% endfor %}{{ n.s }}"
    ),
    "dict() that holds itself twice": (
        "{% set n = namespace(s=1) %}{% for i in range(99) %}{% set n.s = dict(a=n.s, b=n.s) %}{% endfor %}{{ n.s }}"
    ),
    "append of itself": "{% set l = [] %}{% for i in range(99) %}{{ l.append([l, l]) or '' }}{% endfor %}{{ l }}",
    "a list in itself": "{% set l = [] %}{{ l.append(l) or '' }}{{ l | tojson }}",
    "arguments that double": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1, a=kwargs, b=kwargs) }}{% else %}{{ kwargs }}{% endif %}{% endmacro %}"
        "{{ f(99, a=1) }}"
    ),
    "a macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a macro that calls itself twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}"
    ),
    "a recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "a wide field with a name": "{{ '%(a)1000000000d' % {'a': 5} }}",
    "a wide field whose name has brackets": "{{ '%(a(b)c)-1000000000d' % {'a(b)c': 5} }}",
    "a wide field": "{{ '%1000000000d' % 5 }}",
    "a field as wide as a value": "{{ '%*d' % (10**9, 5) }}",
    "a wide format": "{{ '{:1000000000}'.format(5) }}",
    "a format as wide as a value": "{{ '{:{}}'.format(5, 10**9) }}",
    "a wide format filter": "{{ '%1000000000d' | format(5) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "a center filter": "{{ 'a' | center(10**9) }}",
    "map to center": "{{ [0] | map('center', 10**9) | list }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ ('\t' * 100000).expandtabs(10000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "a replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "a join filter": "{{ (['a'] * 100000) | join('b' * 100000) }}",
    "indent": "{{ ('a\n' * 100000) | indent(10000) }}",
    "deep JSON indentation": "{{ [1] | tojson(indent=10**9) }}",
    "a power": "{{ 2 ** (10 ** 9) }}",
    "a growing number": "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "sum of lists": "{{ ([[1] * 1000] * 1000) | sum(start=[]) }}",
    "a wide date": "{{ strftime_now('%1000000000d') }}",
    "fixed text in loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "x" * 999
    + "{% endfor %}{% endfor %}",
    "long texts in loops": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s | upper | length }}{% endfor %}",
    "slices in loops": "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% set t = s[1:] %}{% endfor %}",
}

FORBIDDEN = {
    "classes": "{{ ''.__class__.__mro__ }}",
    "globals of a function": "{{ raise_exception.__globals__.x }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f._func.__globals__.x }}",
    "attributes by filter": "{{ ('' | attr('__class__')).mro() }}",
    "attributes by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "attributes by map": "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list | first | first }}",
    "other files": "{% include 'x' %}",
    "imports": "{% import 'x' as x %}",
    "undefined things": "{{ undefined.x.y }}",
    "bytes": "{{ 'abc'.encode() }}",
    "changing a dict": "{{ messages[0].update({'a': 1}) }}",
}


@pytest.fixture(autouse=True)
def small_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def render(source: str) -> str:
    return ChatTemplate(source, limits=LIMITS).render_raw([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("what", ENDLESS)
def test_a_runaway_template_is_ended(what: str) -> None:
    start = time.process_time()
    with pytest.raises(RequestError):
        render(ENDLESS[what])
    assert time.process_time() - start < 10.0


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_is_outside_stays_outside(what: str) -> None:
    with pytest.raises(RequestError):
        render(FORBIDDEN[what])


def test_a_clock_ends_a_rendering_before_its_steps_do() -> None:
    ticks = iter(range(10**6))
    template = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        limits=Limits(seconds=20),
        monotonic=lambda: float(next(ticks)),
    )
    with pytest.raises(RequestError, match="takes too long"):
        template.render_raw([])
    assert next(ticks) < 30


def test_limits_grow_with_the_conversation() -> None:
    """Long conversations need more than short ones may have."""
    source = "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.content | trim | upper }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 4000} for _ in range(400)]
    text = ChatTemplate(source, limits=LIMITS).render_raw(messages)
    assert len(text) == 400 * (4000 * 5 - 1)


def test_a_usual_rendering_takes_about_a_millisecond() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content | trim }}</u>{% else %}<a>{{ m.content + '' }}"
        "</a>{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source)
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "some text " * 20} for i in range(21)]
    template.render(messages)
    start = time.process_time()
    for _ in range(50):
        template.render(messages)
    assert (time.process_time() - start) / 50 < 0.002 * 3


def test_a_template_that_does_not_end_is_not_tried_in_twenty_ways() -> None:
    ticks = iter(range(1_000_000))
    template = ChatTemplate(ENDLESS["loops in loops"], monotonic=lambda: float(next(ticks)))
    for _ in range(2):
        with pytest.raises(RequestError, match="does not finish within its limits"):
            template.render([{"role": "user", "content": "hi"}])
    assert next(ticks) < 100


def test_a_template_of_a_megabyte_is_refused_before_it_is_compiled() -> None:
    with pytest.raises(ModelError, match=r"it has 1600000 characters, at most 250000 .* --chat-template-file"):
        ChatTemplate("{{ 1 }} " * 200_000)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("", "it gives no reason"),
        ("nothing_of_that_name", "it gives no reason"),
        ("5", "5"),
        ("'x' * 100000", "x" * 2000 + "..."),
        ("'a\\ud800b'", "a?b"),
        ("namespace(a=1)", "<namespace>"),
        ("[1, {'a': none}]", "[1, {'a': None}]"),
    ],
)
def test_whatever_a_template_refuses_with_can_be_shown(argument: str, words: str) -> None:
    template = ChatTemplate("{{ raise_exception(" + argument + ") }}")
    with pytest.raises(InvalidParameter) as caught:
        template.render([{"role": "user", "content": "hi"}])
    assert str(caught.value) == f"the model's chat template refuses these messages: {words}"
