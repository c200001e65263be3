"""One table: op -> the rule its nodes must pass. What is not listed has no kernel on any local device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from app.engine.ggml import Op
from app.engine.opcheck import rules_dense, rules_elementwise, rules_moving, rules_recurrent
from app.engine.opcheck.node import NodeCheck

Rule = Callable[[NodeCheck], None]

RULES: Mapping[Op, Rule] = {
    **rules_elementwise.RULES,
    **rules_moving.RULES,
    **rules_dense.RULES,
    **rules_recurrent.RULES,
}
