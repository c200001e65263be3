"""How prompts share a ubatch's rows."""

from __future__ import annotations

from collections.abc import Sequence


def share_rows(needs: Sequence[int], n_rows: int) -> list[int]:
    """Rows for each prompt, given how many each still needs; `needs` is in order of arrival.

    The oldest is sure of half, so it always advances; the other half goes to whoever is done soonest, so that a short
    prompt never waits for a long one. Equal needs are served in order of arrival.
    """
    shares = [0] * len(needs)
    if not needs:
        return shares
    shares[0] = min(needs[0], -(-n_rows // 2))
    left = n_rows - shares[0]
    for i in sorted(range(len(needs)), key=lambda i: (needs[i] - shares[i], i)):
        more = min(needs[i] - shares[i], left)
        shares[i] += more
        left -= more
    return shares
