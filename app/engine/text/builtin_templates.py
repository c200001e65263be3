"""Templates for models whose file has none, in the words of Jinja."""

from __future__ import annotations

from collections.abc import Mapping

CHATML = """\
{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

GEMMA = """\
{%- if tools -%}
    {{- raise_exception('this format has no place for tools') -}}
{%- endif -%}
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = ns.system + message.content | trim -%}
    {%- else -%}
        {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' -}}
        {%- if ns.system and message.role != 'assistant' -%}
            {{- ns.system + '\\n\\n' -}}
            {%- set ns.system = '' -%}
        {%- endif -%}
        {{- message.content | trim + '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

#: Name -> source, for a template option and for files that lack one.
BUILTIN_TEMPLATES: Mapping[str, str] = {"chatml": CHATML, "gemma": GEMMA}

#: Checks in published templates that refuse what clients rightly send back, and what takes their place.
PATCHES: tuple[tuple[str, str], ...] = (
    (
        '{%- if "<|channel|>analysis<|message|>" in message.content or '
        '"<|channel|>final<|message|>" in message.content %}',
        "{%- if false %}",
    ),
    (
        "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
        "(message['tool_calls'] is not defined or message['tool_calls'] is none or "
        "message['tool_calls']|length == 0) %}",
        "{%- if false %}",
    ),
)


def patched(source: str) -> str:
    """A template without the checks above."""
    for check, replacement in PATCHES:
        source = source.replace(check, replacement)
    return source
