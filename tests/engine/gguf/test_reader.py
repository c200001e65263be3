"""The reader: honest files read in full, others refused in words that say where and how much."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.ggml import GGMLType
from app.engine.gguf.layout import ValueType, parse_layout
from app.engine.gguf.reader import GGUFFile
from app.engine.gguf.writer import TensorData, Typed, write_gguf, write_split_gguf
from app.errors import FormatError, ModelError
from tests.support import goldens_dir

METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.tokens": ["a", "é", "\N{LLAMA}"],
    "tokenizer.ggml.add_bos_token": True,
    "general.signed": -3,
    "general.wide": 1 << 40,
    "general.flags": [True, False],
    "general.scores": [0.5, -1.25],
}
TENSORS = [
    TensorData("first.weight", GGMLType.F32, (3, 2), np.arange(6, dtype=np.float32)),
    TensorData("second.weight", GGMLType.Q8_0, (32, 2), bytes(range(68))),
    TensorData("scalar", GGMLType.F32, (1,), b"\0\0\0\0"),
]
HEAD = b"GGUF" + struct.pack("<I", 3)


def pack_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def header(n_tensors: int, n_pairs: int, body: bytes) -> bytes:
    return HEAD + struct.pack("<qq", n_tensors, n_pairs) + body


def pair(key: str | bytes, type_: int, value: bytes) -> bytes:
    return pack_string(key) + struct.pack("<I", type_) + value


def entry(name: str, dims: tuple[int, ...], type_: int, offset: int, n_dims: int | None = None) -> bytes:
    count = len(dims) if n_dims is None else n_dims
    return pack_string(name) + struct.pack(f"<I{len(dims)}qIQ", count, *dims, type_, offset)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", METADATA, TENSORS)


def test_metadata_and_tensors_come_back(small: Path) -> None:
    file = GGUFFile.open(small)
    assert file.metadata["tokenizer.ggml.tokens"] == [b"a", "é".encode(), "\N{LLAMA}".encode()]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.metadata["general.flags"] == [True, False]
    assert (file.metadata["general.signed"], file.metadata["general.wide"]) == (-3, 1 << 40)
    assert file.metadata["general.scores"] == [0.5, -1.25]
    assert list(file.tensors) == ["first.weight", "second.weight", "scalar"]
    first = file.tensors["first.weight"]
    assert (first.type, first.ne, first.n_dims, first.n_bytes) == (GGMLType.F32, (3, 2, 1, 1), 2, 24)
    assert np.frombuffer(file.data("first.weight"), "<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert bytes(file.data("second.weight")) == bytes(range(68))
    assert file.size_bytes == 24 + 68 + 4
    with pytest.raises(FormatError, match=r"missing tensor 'third\.weight'"):
        file.data("third.weight")


def test_data_is_a_read_only_view_that_outlives_the_file(small: Path) -> None:
    with GGUFFile.open(small) as file:
        view = file.data("second.weight")
        file.forget("second.weight")
    assert view.readonly and bytes(view) == bytes(range(68))


def test_files_of_another_writer_and_our_files_in_another_reader(tmp_path: Path, small: Path) -> None:
    writer = GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_context_length(77)
    writer.add_token_list([b"\xff\xfe", b"x"])
    writer.add_tensor("t", np.arange(8, dtype=np.float32).reshape(2, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = GGUFFile.open(tmp_path / "theirs.gguf")
    assert theirs.integer("llama.context_length") == 77
    assert theirs.metadata["tokenizer.ggml.tokens"] == [b"\xff\xfe", b"x"]
    assert theirs.tensors["t"].ne == (4, 2, 1, 1)
    ours = GGUFReader(small)
    assert [t.name for t in ours.tensors] == ["first.weight", "second.weight", "scalar"]
    assert bytes(ours.tensors[1].data) == bytes(range(68))


def test_golden_files_read_as_another_reader_reads_them() -> None:
    for path in sorted((goldens_dir() / "models").glob("*Q4*.gguf")):
        file, other = GGUFFile.open(path), GGUFReader(path)
        assert list(file.tensors) == [t.name for t in other.tensors]
        for tensor in other.tensors:
            info = file.tensors[tensor.name]
            assert info.offset == tensor.data_offset and info.n_bytes == tensor.n_bytes
            assert list(info.ne[: info.n_dims]) == tensor.shape.tolist()
        assert set(file.metadata) == {k for k in other.fields if not k.startswith("GGUF.")}


def test_typed_getters_name_the_key_and_what_they_wanted(small: Path) -> None:
    file = GGUFFile.open(small)
    assert file.text("general.architecture") == "llama"
    assert file.integer("llama.block_count") == 2
    assert file.number("llama.rope.freq_base") == 10000.0 and file.number("llama.block_count") == 2.0
    assert file.flag("tokenizer.ggml.add_bos_token") is True
    assert file.integers("llama.block_count", 3) == (2, 2, 2)
    assert file.integers("general.flags", 2) == (1, 0)
    assert file.integer("absent", 5) == 5 and file.text("absent", "x") == "x"
    with pytest.raises(FormatError, match=r"'llama\.absent' is missing"):
        file.integer("llama.absent")
    with pytest.raises(FormatError, match=r"'general\.architecture' holds str, expected an integer"):
        file.integer("general.architecture")
    with pytest.raises(FormatError, match=r"'llama\.block_count' holds int, expected a string"):
        file.text("llama.block_count")
    with pytest.raises(FormatError, match=r"'general\.flags' has 2 values, expected 3"):
        file.integers("general.flags", 3)


# Cut and foreign files.


def test_every_cut_is_refused_and_says_so(tmp_path: Path, small: Path) -> None:
    whole = small.read_bytes()
    end = GGUFFile.open(small).tensors["scalar"]
    cut = tmp_path / "cut.gguf"
    for size in range(end.offset + end.n_bytes):
        cut.write_bytes(whole[:size])
        with pytest.raises(FormatError, match=r"cut\.gguf: .*(truncated|not a GGUF file|empty)"):
            GGUFFile.open(cut)


def test_a_cut_in_the_data_names_tensor_offset_needed_and_actual(tmp_path: Path, small: Path) -> None:
    info = GGUFFile.open(small).tensors["second.weight"]
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small.read_bytes()[: info.offset + 10])
    with pytest.raises(FormatError, match=f"'second.weight' at byte {info.offset} needs 68 bytes, but 10 are there"):
        GGUFFile.open(cut)


def test_missing_padding_after_the_last_tensor_is_no_fault(tmp_path: Path, small: Path) -> None:
    info = GGUFFile.open(small).tensors["scalar"]
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(small.read_bytes()[: info.offset + info.n_bytes])
    assert bytes(GGUFFile.open(bare).data("scalar")) == b"\0\0\0\0"


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot open model file .*No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="cannot open model file .*directory"):
        GGUFFile.open(tmp_path)
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html></html>")
    with pytest.raises(FormatError, match="not a GGUF file: it starts with '<!DO'"):
        GGUFFile.open(page)


def check(blob: bytes, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        parse_layout(blob, "f.gguf")


@pytest.mark.parametrize(
    ("version", "match"),
    [
        (b"\0\0\0\x03", "version reads as 50331648: .*other byte order"),
        (struct.pack("<I", 0x00030000), "version reads as 196608: .*byte order"),
        (struct.pack("<I", 0), "version 0 is not supported"),
        (struct.pack("<I", 1), "version 1 is not supported"),
        (struct.pack("<I", 4), "version 4 is not supported"),
    ],
)
def test_versions_and_byte_orders(version: bytes, match: str) -> None:
    check(b"GGUF" + version + bytes(4096), match)


def test_version_2_is_read_and_an_older_container_is_not() -> None:
    assert parse_layout(b"GGUF" + struct.pack("<Iqq", 2, 0, 0), "f").version == 2
    check(b"GGJT" + bytes(64), "not a GGUF file: it starts with 'GGJT'")


BOMBS: dict[str, tuple[bytes, str]] = {
    "giant key": (bytes.fromhex("474755460300000000000000000000000100000000000000ffffffffffff0000"), "promises 1"),
    "2^32 pairs": (bytes.fromhex("474755460300000000000000000000000000000001000000"), "promises 4294967296 metadata"),
    "negative count": (header(-1, 0, b""), "promises -1 tensors"),
    "wrapping string": (header(0, 1, struct.pack("<Q", 2**64 - 1) + bytes(64)), "claims 18446744073709551615 bytes"),
    "long string": (header(0, 1, struct.pack("<Q", 5000) + bytes(64)), "needs 5000 bytes"),
    "empty key": (header(0, 1, pair("", 4, bytes(16))), "key 0 is empty"),
    "key that is no text": (header(0, 1, pair(b"\xff\xff", 4, bytes(16))), "is not text"),
    "duplicate key": (header(0, 2, pair("k", 4, bytes(4)) + pair("k", 4, bytes(4))), "'k' appears twice"),
    "value type 99": (header(0, 1, pair("k", 99, bytes(16))), "'k' has the unknown value type 99"),
    "element type 99": (header(0, 1, pair("k", 9, struct.pack("<IQ", 99, 1) + bytes(8))), "array element type 99"),
    "array of arrays": (header(0, 1, pair("k", 9, struct.pack("<IQ", 9, 1) * 100_000)), "array of arrays"),
    "long array": (header(0, 1, pair("k", 9, struct.pack("<IQ", 4, 2**40))), "claims 1099511627776 elements"),
    "wrapping array": (header(0, 1, pair("k", 9, struct.pack("<IQ", 10, 2**63))), "claims 9223372036854775808"),
    "cut string array": (
        header(0, 1, pair("k", 9, struct.pack("<IQQQ", 8, 2, 0, 50) + bytes(4))),
        "element 1 of .*'k'",
    ),
    "alignment 0": (header(0, 1, pair("general.alignment", 4, struct.pack("<I", 0))), "alignment is 0"),
    "alignment 48": (header(0, 1, pair("general.alignment", 4, struct.pack("<I", 48))), "alignment is 48"),
    "alignment u64": (header(0, 1, pair("general.alignment", 10, struct.pack("<Q", 32))), "UINT64"),
    "2^32 dimensions": (header(1, 0, entry("t", (), 0, 0, 2**32 - 1) + bytes(64)), "'t' claims 4294967295 dimen"),
    "negative extent": (header(1, 0, entry("t", (-1,), 0, 0)), r"impossible shape \[-1\]"),
    "overflowing shape": (header(1, 0, entry("t", (2**31, 2**31, 4), 0, 0)), "impossible shape"),
    "removed type": (header(1, 0, entry("t", (32,), 31, 0)), r"type 31 \(Q4_0_4_4\), which was removed"),
    "unknown type": (header(1, 0, entry("t", (32,), 43, 0)), "unknown type 43"),
    "half a block": (header(1, 0, entry("t", (33,), 8, 0)), "rows of 33 elements"),
    "long name": (header(1, 0, entry("n" * 64, (1,), 0, 0)), "has 64 bytes"),
    "odd offset": (header(1, 0, entry("t", (1,), 0, 4)), "claims offset 4"),
    "gap": (header(1, 0, entry("t", (1,), 0, 64) + bytes(256)), "claims offset 64"),
    "twice": (header(2, 0, entry("t", (1,), 0, 0) + entry("t", (1,), 0, 32) + bytes(256)), "'t' appears twice"),
    "huge tensor": (header(1, 0, entry("t", (2**50,), 0, 0)), "needs 4503599627370496 bytes"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_at_once(name: str) -> None:
    blob, match = BOMBS[name]
    tracemalloc.start()
    start = time.monotonic()
    try:
        check(blob, match)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 1
    assert peak_bytes < 20_000_000


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_header_is_refused_or_read_but_never_crashes(data: st.DataObject) -> None:
    blob = bytearray(honest_header())
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(4, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        layout = parse_layout(bytes(blob), "f.gguf")
    except FormatError:
        return
    assert all(info.offset + info.n_bytes <= len(blob) for info in layout.tensors)


def honest_header() -> bytes:
    keys = pair("general.alignment", 4, struct.pack("<I", 32)) + pair("s", 8, pack_string("text"))
    keys += pair("a", 9, struct.pack("<IQ", 8, 2) + pack_string("x") + pack_string("yy"))
    return header(2, 3, keys + entry("t", (4, 2), 0, 0) + entry("u", (32,), 8, 32) + bytes(200))


def test_an_honest_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    n = 300_000
    metadata = {
        "general.architecture": "llama",
        "tokenizer.ggml.tokens": [f"token-{i}" for i in range(n)],
        "tokenizer.ggml.merges": [f"a{i} b{i}" for i in range(n)],
        "tokenizer.ggml.scores": [float(i) for i in range(n)],
        "tokenizer.ggml.token_type": Typed(ValueType.INT32, [1] * n),
    }
    path = write_gguf(tmp_path / "large.gguf", metadata, [])
    start = time.process_time()
    file = GGUFFile.open(path)
    assert time.process_time() - start < 1
    assert file.metadata["tokenizer.ggml.tokens"][-1] == b"token-299999"
    assert len(file.metadata["tokenizer.ggml.merges"]) == n


# Split files.


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return write_split_gguf(tmp_path, "t", METADATA, [[t] for t in TENSORS])


def test_a_split_model_equals_the_whole(parts: list[Path], small: Path) -> None:
    whole, split = GGUFFile.open(small), GGUFFile.open(parts[0])
    assert list(split.tensors) == list(whole.tensors)
    for name in whole.tensors:
        assert bytes(split.data(name)) == bytes(whole.data(name))
    assert split.metadata["llama.block_count"] == 2


def test_one_of_one_is_a_whole_model(tmp_path: Path) -> None:
    [path] = write_split_gguf(tmp_path, "one", METADATA, [TENSORS])
    assert path.name == "one-00001-of-00001.gguf"
    assert len(GGUFFile.open(path).tensors) == 3


def rename(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("t.gguf"))


def join(parts: list[Path]) -> Path:
    joined = parts[0].with_name("joined.gguf")
    joined.write_bytes(b"".join(p.read_bytes() for p in parts))
    return joined


def without_second(parts: list[Path]) -> Path:
    parts[1].unlink()
    return parts[0]


def foreign_third(parts: list[Path]) -> Path:
    groups = [[TensorData(f"x{i}{j}", GGMLType.F32, (1,), bytes(4)) for j in range(2)] for i in range(3)]
    other = write_split_gguf(parts[0].parent, "other", {}, groups)
    other[2].replace(parts[2])
    return parts[0]


def swapped(parts: list[Path]) -> Path:
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(second)
    return parts[0]


def same_tensor_twice(parts: list[Path]) -> Path:
    group = [[TENSORS[0]], [TENSORS[1]], [TENSORS[0]]]
    return write_split_gguf(parts[0].parent, "t", METADATA, group)[0]


@pytest.mark.parametrize(
    ("prepare", "match"),
    [
        (
            lambda parts: parts[1],
            r"t-00002-of-00003\.gguf: this is file 2 of 3 .* give the first, t-00001-of-00003\.gguf",
        ),
        (without_second, r"t-00002-of-00003\.gguf: missing; t-00001-of-00003\.gguf is the first of 3"),
        (foreign_third, r"t-00003-of-00003\.gguf: split\.tensors\.count is 6, expected 3"),
        (swapped, r"t-00002-of-00003\.gguf: split\.no is 2, expected 1"),
        (rename, r"t\.gguf: the first of 3 files .* renamed, or files were joined"),
        (join, r"joined\.gguf: the first of 3 files"),
        (same_tensor_twice, r"t-00003-of-00003\.gguf: tensor 'first\.weight' is also in"),
    ],
)
def test_split_models_that_do_not_fit_together(parts: list[Path], prepare: Callable[..., Path], match: str) -> None:
    with pytest.raises(FormatError, match=match):
        GGUFFile.open(prepare(parts))


def test_a_part_of_another_model_with_the_same_numbers_is_found_by_its_total(parts: list[Path]) -> None:
    write_split_gguf(
        parts[0].parent, "o", {}, [[], [], [TensorData(f"x{i}", GGMLType.F32, (1,), bytes(4)) for i in (1, 2, 3)]]
    )
    (parts[0].parent / "o-00003-of-00003.gguf").replace(parts[2])
    with pytest.raises(FormatError, match=r"split\.tensors\.count says 3, but the files hold 5"):
        GGUFFile.open(parts[0])


# Files of more than 4 GiB.


def test_tensors_beyond_4_gib_are_found_where_they_lie(tmp_path: Path) -> None:
    """The file has holes, so it takes no room on the disk."""
    n_bytes = 5 << 30
    head = header(2, 0, entry("large", (1 << 18, n_bytes >> 20), 0, 0) + entry("last", (4,), 0, n_bytes))
    path = tmp_path / "large.gguf"
    start = -(-len(head) // 32) * 32
    with path.open("wb") as file:
        file.write(head)
        file.seek(start + n_bytes - 4)
        file.write(np.float32(7).tobytes() + np.arange(4, dtype=np.float32).tobytes())
    whole = GGUFFile.open(path)
    assert whole.tensors["last"].offset == start + n_bytes > 1 << 32
    assert np.frombuffer(whole.data("last"), "<f4").tolist() == [0, 1, 2, 3]
    assert len(whole.data("large")) == n_bytes
    assert np.frombuffer(whole.data("large")[-4:], "<f4") == 7
    whole.forget("large")
