"""llama-server's `samplers`: which filters are in use. Our order is its default one and is not changed by requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.errors import InvalidParameter

#: Every step, in the order in which it happens, with the parameters that switch it off.
STEPS: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0},
    "infill": {},
}
#: What `infill` comes to here: only tokens at least a fifth as likely as the best one.
INFILL = {"min_p": 0.2}
ALIASES = {"typical_p": "typ_p", "typical": "typ_p", "top-k": "top_k", "top-p": "top_p", "min-p": "min_p"}
LETTERS = dict(zip("edskypmxti", STEPS, strict=True))


def switched(samplers: Sequence[str] | str) -> dict[str, float]:
    """Parameters that switch off the steps which are not named. Raises for unknown names and for another order."""
    if isinstance(samplers, str):
        named = [LETTERS.get(letter, letter) for letter in samplers]
    else:
        named = [ALIASES.get(name.lower(), name.lower()) for name in samplers]
    for name in named:
        if name not in STEPS:
            raise InvalidParameter(f"samplers names {name[:40]!r}; there are {', '.join(STEPS)}", param="samplers")
    order = list(STEPS)
    if named != sorted(named, key=order.index):
        raise InvalidParameter(
            f"samplers are in another order; here it always is {', '.join(STEPS)}", param="samplers", code="unsupported"
        )
    off = {key: value for name, keys in STEPS.items() if name not in named for key, value in keys.items()}
    return {**off, **INFILL} if "infill" in named and "min_p" not in named else off
