"""Whether a program may run at all: every op, type, shape, stride and place, checked before a kernel sees it.

Programs come from our own plans and, through a worker, from peers; kernels trust
this check and look no further. Only what lies in tensors as data (row ids, expert ids) is left to the kernels, which
check it as they run.
"""

from app.engine.opcheck.program import check_program
from app.engine.opcheck.rules import RULES

__all__ = ["RULES", "check_program"]
