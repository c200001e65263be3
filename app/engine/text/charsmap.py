"""Normalisation tables of SentencePiece: the longest known text at each place is replaced by another.

Layout, little-endian: bytes of the trie as u32; the trie, a compressed double array of u32 units; then the
replacements, each closed by NUL. A unit holds in bits 0-7 the byte that leads to it, in bit 8 whether a value hangs
below it, in bits 10-30 the distance to its children (times 256 when bit 9 is set); a value is the offset of the
replacement. Source: https://github.com/s-yata/darts-clone, the layout of its `DoubleArrayUnit`.
"""

from __future__ import annotations

import re
import struct

from app.errors import FormatError


class CharsMap:
    """One table. `apply` is linear in the text; characters that begin no entry are found once and skipped over."""

    def __init__(self, blob: bytes) -> None:
        size = struct.unpack_from("<I", blob)[0] if len(blob) >= 4 else 0
        if len(blob) < 4 or size % 4 or size > len(blob) - 4:
            raise FormatError(
                f"the charsmap has {len(blob)} bytes, but announces a trie of {size}; the file is damaged"
            )
        self._units: tuple[int, ...] = struct.unpack_from(f"<{size // 4}I", blob, 4)
        self._replacements = blob[4 + size :]
        self._inert: dict[str, bool] = {}

    def apply(self, text: str) -> str:
        active = "".join(char for char in set(text) if not self._is_inert(char))
        if not active:
            return text
        out: list[str] = []
        at = 0
        for match in re.finditer(f"[{re.escape(active)}]", text):
            if match.start() < at:
                continue  # inside an entry that was replaced
            found = self._longest(text, match.start())
            if found is not None:
                out.append(text[at : match.start()])
                n_chars, replacement = found
                out.append(replacement)
                at = match.start() + n_chars
        out.append(text[at:])
        return "".join(out)

    def _is_inert(self, char: str) -> bool:
        """Whether no entry begins with this character."""
        known = self._inert.get(char)
        if known is None:
            known = self._inert[char] = self._walk(0, char.encode("utf-8", "surrogatepass")) is None
        return known

    def _longest(self, text: str, start: int) -> tuple[int, str] | None:
        """Characters that the longest entry at `start` covers, and what replaces them."""
        found: tuple[int, str] | None = None
        node = 0
        for n_chars, char in enumerate(text[start : start + 64], 1):
            below = self._walk(node, char.encode("utf-8", "surrogatepass"))
            if below is None:
                break
            node = below
            value = self._value(node)
            if value is not None:
                found = n_chars, value
        return found

    def _walk(self, node: int, path: bytes) -> int | None:
        """The node that these bytes lead to from `node`."""
        for byte in path:
            node ^= self._offset(self._unit(node)) ^ byte
            if self._unit(node) & 0x800000FF != byte:
                return None
        return node

    def _value(self, node: int) -> str | None:
        unit = self._unit(node)
        if not unit >> 8 & 1:
            return None
        start = self._unit(node ^ self._offset(unit)) & 0x7FFFFFFF
        end = self._replacements.find(b"\0", start)
        if start > len(self._replacements) or end < 0:
            raise FormatError(f"the charsmap points to byte {start} of {len(self._replacements)}; the file is damaged")
        return self._replacements[start:end].decode("utf-8", "replace")

    def _unit(self, node: int) -> int:
        if node >= len(self._units):
            raise FormatError(f"the charsmap points to unit {node} of {len(self._units)}; the file is damaged")
        return self._units[node]

    @staticmethod
    def _offset(unit: int) -> int:
        return (unit >> 10) << ((unit & 0x200) >> 6)
