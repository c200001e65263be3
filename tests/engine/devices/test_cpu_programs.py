"""What the native compiler shares, moves and remembers between nodes and programs changes no result."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from app.engine.device import Device
from app.engine.devices.numpy import NumpyDevice
from app.engine.ggml import GGMLType, Op, TensorFlag
from app.engine.graph import Tensor
from app.engine.program import PlacedTensor, Program
from app.errors import DeviceError, OutOfDeviceMemory
from tests.contract.cases import F16, F32, I32, I64, CaseBuilder, Values, place, read_all, strided

cpu = pytest.importorskip("app.engine.devices.cpu", reason="the native kernels are not built")

Build = Callable[[CaseBuilder], list[Tensor]]
Q4_0 = GGMLType.Q4_0
#: 16 dimensions, no scaling.
ROPE = (0, 16, 0, 0, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0, 0, 0, 0, 0, 0)


@pytest.fixture(params=[1, 2])
def native(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = cpu.CpuDevice("CPU", request.param)
    yield device
    device.close()


def results(build: Build, device: Device, *, together: bool) -> list[Values]:
    """What the tensors hold after all nodes ran, in one program or each in a program that is prepared after the one
    before it ran."""
    case = CaseBuilder("programs")
    wanted = build(case)
    placed = place(case, device)
    program = placed.program
    computed = [i for i in program.nodes if program.tensors[i].is_computed]
    for nodes in [program.nodes] if together else [(i,) for i in computed]:
        device.run(device.prepare(Program("part", program.tensors, tuple(nodes))))
        device.synchronize()
    after = read_all(device, placed.buffer)
    return [strided(t, after, placed.offsets[id(t.owner)] + t.view_offs) for t in wanted]


def agree(build: Build, native: Device, *, together: bool = True) -> None:
    reference = NumpyDevice("CPU", 1)
    for got, want in zip(
        results(build, native, together=together), results(build, reference, together=together), strict=True
    ):
        if want.dtype == np.float32:
            np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max(), rtol=0)
        else:
            np.testing.assert_array_equal(got, want)
    reference.close()


def test_a_product_whose_matrix_is_a_product_waits_for_it(native: Device) -> None:
    def build(c: CaseBuilder) -> list[Tensor]:
        x, w0, w1 = c.random(F32, 64, 64), c.random(F32, 64, 48), c.random(F32, 64, 64)
        first, second = (c.node(Op.MUL_MAT, F32, (w.ne[1], 64), (w, x)) for w in (w0, w1))
        return [first, second, c.node(Op.MUL_MAT, F32, (64, 64), (second, x))]

    agree(build, native)


def test_a_product_is_not_written_over_a_matrix_still_in_use(native: Device) -> None:
    def build(c: CaseBuilder) -> list[Tensor]:
        a, w, x = c.random(F32, 2048, 64), c.random(F32, 2048, 16), c.random(F32, 2048, 4)
        first = c.node(Op.MUL_MAT, F32, (64, 4), (a, x))
        place_of_a = c.view(a, (16, 4), (4, 64, 256, 256), a.n_bytes - 256)
        return [first, c.node(Op.MUL_MAT, F32, (16, 4), (w, x), alias=place_of_a)]

    agree(build, native)


def test_activations_in_use_keep_their_room(native: Device) -> None:
    """Two products of one x want it as bytes and as floats, while other activations have their rooms too."""

    def build(c: CaseBuilder) -> list[Tensor]:
        x, q, other = c.random(F16, 64, 2), c.random(Q4_0, 64, 16), c.random(F32, 32, 16)
        stored, made = c.random(Q4_0, 64, 16), c.random(Q4_0, 32, 64)
        first = c.node(Op.MUL_MAT, F32, (16, 2), (q, x))
        floats = c.node(Op.MUL_MAT, F32, (64, 16), (made, other))
        quantized = c.node(Op.CPY, Q4_0, (64, 16), (c.random(F32, 64, 16), stored), alias=stored)
        return [first, *(c.node(Op.MUL_MAT, F32, (16, 2), (w, x)) for w in (floats, quantized))]

    agree(build, native)


def test_every_rotation_has_its_own_positions(native: Device) -> None:
    def build(c: CaseBuilder) -> list[Tensor]:
        x = c.random(F32, 16, 2, 3)
        places = [c.leaf(I32, np.array(p)) for p in ([0, 1, 2], [100, 200, 300])]
        return [c.node(Op.ROPE, F32, x.ne, (x, p), ROPE) for p in places]

    agree(build, native)


@pytest.mark.parametrize("changed", ["positions", "factors"])
def test_a_rotation_sees_what_was_written_since_the_last_one(native: Device, changed: str) -> None:
    def build(c: CaseBuilder) -> list[Tensor]:
        x, positions, factors = c.random(F32, 16, 2, 3), c.leaf(I32, np.array([10, 11, 12])), c.leaf(F32, np.ones(8))
        first = c.node(Op.ROPE, F32, x.ne, (x, positions, factors), ROPE)
        if changed == "positions":
            source = c.leaf(I32, np.array([7, 70, 700]))
            positions = c.node(Op.CPY, I32, (3,), (source, positions), alias=positions)
        else:
            factors = c.node(Op.CPY, F32, (8,), (c.leaf(F32, np.full(8, 3.0)), factors), alias=factors)
        return [first, c.node(Op.ROPE, F32, x.ne, (x, positions, factors), ROPE)]

    agree(build, native)


def _part(c: CaseBuilder, w: Tensor, x: Tensor) -> Tensor:
    return c.node(Op.MUL_MAT, F32, (29, 2), (c.view(w, (256, 29), w.nb, 3 * w.nb[1]), x))


def _rows(c: CaseBuilder, w: Tensor, x: Tensor) -> Tensor:
    ids = c.leaf(I32, np.arange(29))
    return c.node(Op.GET_ROWS, F32, (256, 29), (c.view(w, (256, 29), w.nb, 3 * w.nb[1]), ids))


def _copy(c: CaseBuilder, w: Tensor, x: Tensor) -> Tensor:
    return c.node(Op.DUP, Q4_0, (256, 32), (w,))


def _store(c: CaseBuilder, w: Tensor, x: Tensor) -> Tensor:
    return c.node(Op.SET_ROWS, Q4_0, w.ne, (x, c.leaf(I64, np.array([1, 5])), w), alias=w)


@pytest.mark.parametrize("use", [_part, _rows, _copy, _store])
def test_a_weight_is_whole_for_programs_prepared_after_it_was_multiplied(
    native: Device, use: Callable[[CaseBuilder, Tensor, Tensor], Tensor]
) -> None:
    def build(c: CaseBuilder) -> list[Tensor]:
        w, x = c.random(Q4_0, 256, 32), c.random(F32, 256, 2)
        product = c.node(Op.MUL_MAT, F32, (32, 2), (w, x))
        return [product, use(c, w, x), w]

    agree(build, native, together=False)


def test_a_weight_may_be_multiplied_later_in_another_shape(native: Device) -> None:
    case = CaseBuilder("shapes")
    w, x = case.random(Q4_0, 256, 32), case.random(F32, 256, 2)
    case.node(Op.MUL_MAT, F32, (32, 2), (w, x))
    folded, narrow = case.random(Q4_0, 128, 64), case.random(F32, 128, 2)
    product = case.node(Op.MUL_MAT, F32, (64, 2), (folded, narrow))

    def run(device: Device, *, first: bool) -> Values:
        placed = place(case, device)
        tensors = list(placed.program.tensors)
        at = {t.name: i for i, t in enumerate(tensors)}
        tensors[at[folded.name]] = replace(tensors[at[folded.name]], offset=tensors[at[w.name]].offset)
        for node in placed.program.nodes[0 if first else 1 :]:
            device.run(device.prepare(Program("part", tuple(tensors), (node,))))
            device.synchronize()
        return strided(product, read_all(device, placed.buffer), placed.offsets[id(product)])

    np.testing.assert_array_equal(run(native, first=True), run(native, first=False))


def test_of_rows_stored_twice_the_last_one_stays(native: Device) -> None:
    def build(c: CaseBuilder) -> list[Tensor]:
        cache, ids = c.leaf(F32, np.zeros((4, 1024))), c.leaf(I64, np.array([0, 2] * 32))
        rows = c.leaf(F32, np.repeat(np.arange(64)[:, None], 1024, 1))
        return [c.node(Op.SET_ROWS, F32, cache.ne, (rows, ids, cache), alias=cache)]

    assert [row[0] for row in results(build, native, together=True)[0][0, 0]] == [62, 0, 63, 0]


@pytest.mark.parametrize("op", [Op.GET_ROWS, Op.SET_ROWS, Op.ADD_ID])
def test_ids_are_used_as_they_were_checked(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    """Even if the check of the program let ids lie under the result: what row 0 writes over id 1 is never followed."""
    monkeypatch.setattr("app.engine.devices.host.check_program", lambda program, name: None)
    device = cpu.CpuDevice("CPU", 1)
    buffer = device.alloc(1 << 16)
    image = np.zeros(1 << 14, np.int32)
    image[2048:2052] = 1_000_000_000  # the row that lands on the ids; outside the buffer as an id
    device.write(buffer, 0, image.tobytes()).result()

    def tensor(
        type_: GGMLType, ne: tuple[int, ...], nb: tuple[int, ...], offset: int = 0, **more: object
    ) -> PlacedTensor:
        fields = {"op": Op.NONE, "src": (), "flags": TensorFlag.NONE} | more
        shape, strides = (*ne, 1, 1, 1, 1)[:4], (*nb, *(nb[-1],) * 4)[:4]
        where = {"view_src": -1, "view_offs": 0, "buffer": buffer, "offset": offset}
        return PlacedTensor(type=type_, ne=shape, nb=strides, params=(), name="t", **where, **fields)  # type: ignore

    rows = tensor(F32, (4, 2), (4, 16, 32), 8192)
    ids = tensor(I64 if op is Op.SET_ROWS else I32, (2,), (8, 16))
    if op is Op.SET_ROWS:
        out = tensor(F32, (4, 64), (4, 32, 2048), op=op, src=(0, 1, 2), flags=TensorFlag.COMPUTE)
        tensors = (rows, ids, tensor(F32, (4, 64), (4, 32, 2048)), out)
    else:
        src = (0, 1) if op is Op.GET_ROWS else (2, 0, 1)
        out = tensor(F32, (4, 2), (4, 16, 32), op=op, src=src, flags=TensorFlag.COMPUTE)
        tensors = (rows, ids, tensor(F32, (4, 2), (4, 16, 32), 4096), out)
    device.run(device.prepare(Program("changing ids", tensors, (3,))))
    device.synchronize()
    got = read_all(device, buffer).view(np.int32)
    if op is Op.SET_ROWS:  # of equal ids the last wins: zeros
        assert not got[:8].any()
    else:
        assert got[:8].tolist() == [1_000_000_000] * 8
    device.close()


def test_wrong_ids_still_fail_the_run(native: Device) -> None:
    case = CaseBuilder("wrong")
    cache = case.random(F32, 4, 3)
    case.node(
        Op.SET_ROWS, F32, cache.ne, (case.random(F32, 4, 2), case.leaf(I64, np.array([3, 3])), cache), alias=cache
    )
    placed = place(case, native)
    native.run(native.prepare(placed.program))
    with pytest.raises(DeviceError, match="row id 3 is out of range"):
        native.synchronize()


def test_a_block_that_is_not_finite_spoils_its_own_token_alone_and_the_same_in_every_variant() -> None:
    def build(c: CaseBuilder, odd: float) -> Tensor:
        w, x = c.random(Q4_0, 256, 16), c.rng.standard_normal((3, 256))
        x[1, 40] = odd
        return c.node(Op.MUL_MAT, F32, (16, 3), (w, c.leaf(F32, x)))

    for variant in cpu._cpu.variants():
        device = cpu.CpuDevice("CPU", 1, variant=variant)
        (sound,) = results(lambda c: [build(c, 0.5)], device, together=True)
        for odd in (np.inf, -np.inf, np.nan):
            (got,) = results(lambda c, odd=odd: [build(c, odd)], device, together=True)  # type: ignore[misc]
            assert np.isnan(got[0, 0, 1]).all()
            np.testing.assert_array_equal(got[0, 0, ::2], sound[0, 0, ::2])
        device.close()


def attention(n_heads: int, n_cells: int) -> CaseBuilder:
    """One token whose heads see one cell of every block, all heads alike."""
    case = CaseBuilder("attention")
    q = np.repeat(case.rng.standard_normal((1, 1, 1)), n_heads, 0)
    k, v = (case.rng.standard_normal((1, n_cells, 1)) for _ in range(2))
    mask = np.full((1, n_cells), -np.inf)
    mask[0, : 64 * 20 : 64] = 0
    sources = (case.leaf(F32, q), case.leaf(F16, k), case.leaf(F16, v), case.leaf(F16, mask), None)
    case.node(Op.FLASH_ATTN_EXT, F32, (1, n_heads, 1), sources, (1.0, 0.0, 0.0, 10))
    return case


def test_many_heads_over_many_cells_need_little_scratch(native: Device) -> None:
    """And what they compute is what few heads compute."""
    answers = []
    for n_heads in (64, 8192):
        case = attention(n_heads, 1 << 16)
        placed = place(case, native)
        handle = native.prepare(placed.program)
        assert handle.native.scratch_bytes < 70 << 20  # type: ignore[attr-defined]
        native.run(handle)
        after = read_all(native, placed.buffer)
        answers.append(np.unique(strided(case.nodes[-1], after, placed.offsets[id(case.nodes[-1])])))
        native.release(handle)
        native.free(placed.buffer)
    assert len(answers[0]) == 1
    np.testing.assert_array_equal(*answers)


def test_a_program_whose_scratch_exceeds_the_limit_is_refused() -> None:
    device = cpu.CpuDevice("CPU", 1, memory_limit_bytes=200_000)
    case = CaseBuilder("scratch")
    w, x = case.random(Q4_0, 64, 16), case.random(F32, 8192 + 64)
    rows = case.view(x, (64, 2048), (4, 16, 16 * 2048, 16 * 2048))  # every element in sixteen rows
    case.node(Op.MUL_MAT, F32, (16, 2048), (w, rows))
    placed = place(case, device)
    with pytest.raises(OutOfDeviceMemory, match=r"refused an allocation of 0\.\d MiB, 0\.2 MiB are free"):
        device.prepare(placed.program)
    device.close()


OUT_OF_MEMORY = """
import resource
import numpy as np
from app.engine.devices.cpu import CpuDevice
from app.engine.ggml import Op
from app.errors import OutOfDeviceMemory
from tests.contract.cases import F32, CaseBuilder, GGMLType, place
device, case, k = CpuDevice("CPU", 2), CaseBuilder("x"), 1 << 22
w = case.raw_leaf(GGMLType.Q4_0, (k, 32), np.zeros((32, k // 32 * 18), np.uint8))
case.node(Op.MUL_MAT, F32, (32, 1), (w, case.leaf(F32, np.ones((1, k)))))
placed = place(case, device)
handle = device.prepare(placed.program)
device.read(placed.buffer, 0, 4).result()  # what the lane still held is free again
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))
device.run(handle)
try:
    device.synchronize()
except OutOfDeviceMemory as error:
    print(error.needed_bytes)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
device.run(handle)
device.synchronize()
print("works on")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_no_memory_for_scratch_fails_the_program_and_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    needed, then = done.stdout.splitlines()
    assert int(needed) > 4 << 20 and then == "works on"


def test_the_largest_of_a_row_with_nan_is_the_first_nan(native: Device) -> None:
    rows = np.array([[1, 2, 3, np.nan, 5, np.nan], [np.nan, 9, 1, 2, 3, 4], [1, 7, 7, np.inf, np.inf, -np.inf]])
    (got,) = results(lambda c: [c.node(Op.ARGMAX, I32, (3,), (c.leaf(F32, rows),))], native, together=True)
    assert got.reshape(-1).tolist() == [3, 0, 3]
