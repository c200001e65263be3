"""Weights stay home: found in a worker's own files or in its cache, checked before use, and not sent twice."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.engine.device import WeightHint
from app.engine.ggml import GGMLType
from app.engine.gguf.reader import GGUFFile
from app.engine.gguf.writer import TensorData, write_gguf, write_split_gguf
from app.engine.kernels.hash import fnv1a64
from app.errors import ConfigError
from app.rpc import tensor_hashes
from app.rpc.device import RpcDevice
from app.rpc.tensor_hashes import TensorHashes
from app.rpc.weight_cache import WeightCache
from app.rpc.weights import ModelIndex
from app.rpc.worker import Worker, WorkerSettings
from tests.rpc.adder import Adder
from tests.rpc.workers import connected, tcp_worker

KIB = 1 << 10
RNG = np.random.default_rng(11)
TENSORS = [
    TensorData("big.weight", GGMLType.F32, (256, 96), RNG.standard_normal((96, 256), np.float32)),
    TensorData("small.weight", GGMLType.F32, (16,), RNG.standard_normal(16, np.float32)),
    TensorData("other.weight", GGMLType.F32, (256, 32), RNG.standard_normal((32, 256), np.float32)),
]
METADATA = {"general.architecture": "none"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models" / "deep"
    folder.mkdir(parents=True)
    return write_gguf(folder / "m.gguf", METADATA, TENSORS)


def content(name: str) -> bytes:
    return next(np.asarray(tensor.data).tobytes() for tensor in TENSORS if tensor.name == name)


# -- hashes kept beside nothing -------------------------------------------------------------------------------------


def test_hashes_are_computed_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TensorHashes(GGUFFile.open(model), tmp_path / "hashes")
    values = {tensor.name: first.of(tensor.name) for tensor in TENSORS}
    assert values == {tensor.name: fnv1a64(content(tensor.name)) for tensor in TENSORS}
    first.save()
    monkeypatch.setattr(tensor_hashes, "fnv1a64", lambda data: pytest.fail("computed again"))
    second = TensorHashes(GGUFFile.open(model), tmp_path / "hashes")
    assert {tensor.name: second.of(tensor.name) for tensor in TENSORS} == values


@pytest.mark.parametrize("how", ["touched", "damaged", "emptied", "of another shape"])
def test_hashes_of_another_file_are_not_believed(model: Path, tmp_path: Path, how: str) -> None:
    hashes = TensorHashes(GGUFFile.open(model), tmp_path / "hashes")
    right = [hashes.of(tensor.name) for tensor in TENSORS]
    hashes.save()
    (kept,) = (tmp_path / "hashes").iterdir()
    text = json.loads(kept.read_text())
    text["hashes"] = dict.fromkeys(text["hashes"], "0" * 16)
    kept.write_text(json.dumps(text))
    if how == "touched":
        os.utime(model, ns=(1, 1))
    else:
        kept.write_text({"damaged": kept.read_text()[:-9], "emptied": "", "of another shape": "[]"}[how])
    again = TensorHashes(GGUFFile.open(model), tmp_path / "hashes")
    assert [again.of(tensor.name) for tensor in TENSORS] == right


def test_hashes_that_cannot_be_kept_are_still_right(model: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    hashes = TensorHashes(GGUFFile.open(model), blocked)
    assert hashes.of("big.weight") == fnv1a64(content("big.weight"))
    hashes.save()


# -- the worker's own models ----------------------------------------------------------------------------------------


@pytest.fixture
def index(model: Path, tmp_path: Path) -> ModelIndex:
    made = ModelIndex(tmp_path / "models", tmp_path / "hashes")
    made.wait()
    return made


def test_a_tensor_is_found_by_hash_and_length(index: ModelIndex) -> None:
    for name in ("big.weight", "other.weight"):
        data = content(name)
        found = index.find(fnv1a64(data), len(data))
        assert found is not None and found.readonly and bytes(found) == data
        assert index.find(fnv1a64(data), len(data) - 4) is None
        assert index.find(fnv1a64(data) ^ 1, len(data)) is None


def test_small_tensors_are_not_indexed(index: ModelIndex) -> None:
    data = content("small.weight")
    assert index.find(fnv1a64(data), len(data)) is None


def test_a_file_that_changed_is_not_used(index: ModelIndex, model: Path) -> None:
    data = content("big.weight")
    offset = GGUFFile.open(model).tensor("big.weight").offset
    with open(model, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xff")
    assert index.find(fnv1a64(data), len(data)) is None
    assert index.find(fnv1a64(data), len(data)) is None


def test_a_change_is_noticed_though_the_time_of_writing_was_set_back(index: ModelIndex, model: Path) -> None:
    data = content("big.weight")
    assert index.find(fnv1a64(data), len(data)) is not None
    before, offset = model.stat(), GGUFFile.open(model).tensor("big.weight").offset
    with open(model, "r+b") as file:
        file.seek(offset)
        file.write(b"\xff\xff")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert index.find(fnv1a64(data), len(data)) is None


def cut_short(path: Path) -> None:
    os.truncate(path, 100)


@pytest.mark.parametrize("cut", [cut_short, Path.unlink], ids=["cut", "gone"])
def test_a_file_that_was_cut_or_removed_is_not_touched(
    index: ModelIndex, model: Path, cut: Callable[[Path], None]
) -> None:
    data = content("big.weight")
    assert index.find(fnv1a64(data), len(data)) is not None
    cut(model)
    assert index.find(fnv1a64(data), len(data)) is None


def test_a_pipe_among_the_models_holds_nobody_up(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(model.parent / "a.gguf")
    index = ModelIndex(model.parent, tmp_path / "hashes")
    index.wait()
    data = content("big.weight")
    assert index.find(fnv1a64(data), len(data)) is not None
    assert "no regular file" in caplog.text


def test_split_models_are_indexed_whole_and_bad_files_are_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_split_gguf(tmp_path, "s", METADATA, [TENSORS[:1], TENSORS[1:]])
    (tmp_path / "bad.gguf").write_bytes(b"GGUFwhat")
    with caplog.at_level(logging.WARNING):
        index = ModelIndex(tmp_path, tmp_path / "hashes")
        index.wait()
    for name in ("big.weight", "other.weight"):
        assert index.find(fnv1a64(content(name)), len(content(name))) is not None
    assert ["bad.gguf" in record.getMessage() for record in caplog.records] == [True]


def test_a_model_directory_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        Worker([], WorkerSettings(model_dir=tmp_path / "no", hash_dir=tmp_path))


# -- the cache ------------------------------------------------------------------------------------------------------


def put(cache: WeightCache, data: bytes) -> tuple[int, int]:
    writer = cache.writer(len(data))
    assert writer is not None
    for start in range(0, len(data), 1000):
        writer.add(memoryview(data)[start : start + 1000])
    writer.finish()
    return fnv1a64(data), len(data)


def blob(seed: int, size: int = 4 * KIB) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def test_what_was_kept_is_found_also_by_the_next_run(tmp_path: Path) -> None:
    key = put(WeightCache(tmp_path / "c", 64 * KIB), blob(1))
    cache = WeightCache(tmp_path / "c", 64 * KIB)
    found = cache.find(*key)
    assert found is not None and found.readonly and bytes(found) == blob(1)
    assert cache.used_bytes == 4 * KIB
    assert cache.find(key[0], key[1] + 1) is None


def test_the_longest_unused_goes_first(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 12 * KIB)
    keys = [put(cache, blob(i)) for i in range(3)]
    assert cache.find(*keys[0]) is not None
    keys.append(put(cache, blob(3)))
    assert [cache.find(*key) is not None for key in keys] == [True, False, True, True]
    assert cache.used_bytes == 12 * KIB
    assert len(list(tmp_path.iterdir())) == 3


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    keys = [put(WeightCache(tmp_path, 64 * KIB), blob(i)) for i in range(4)]
    for i, key in enumerate(keys):
        os.utime(tmp_path / f"{key[0]:016x}-{key[1]}", ns=(i, i))
    cache = WeightCache(tmp_path, 8 * KIB)
    assert [cache.find(*key) is not None for key in keys] == [False, False, True, True]


def test_damaged_files_are_removed(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 64 * KIB)
    keys = [put(cache, blob(i)) for i in range(3)]
    paths = [tmp_path / f"{key[0]:016x}-{key[1]}" for key in keys]
    paths[0].write_bytes(blob(9))
    paths[1].write_bytes(blob(1)[:-1])
    paths[2].unlink()
    assert [cache.find(*key) for key in keys] == [None, None, None]
    assert list(tmp_path.iterdir()) == []
    assert cache.used_bytes == 0


def test_nothing_half_written_is_ever_found(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 64 * KIB)
    writer = cache.writer(4 * KIB)
    assert writer is not None
    writer.add(memoryview(blob(1)[:KIB]))
    assert cache.find(fnv1a64(blob(1)), 4 * KIB) is None
    assert WeightCache(tmp_path, 64 * KIB).used_bytes == 0
    assert list(tmp_path.iterdir()) == []
    writer.add(memoryview(blob(1)[KIB:]))
    writer.finish()  # its file is gone: logged, and no harm done
    assert cache.find(fnv1a64(blob(1)), 4 * KIB) is None


def test_what_is_too_big_is_not_kept(tmp_path: Path) -> None:
    assert WeightCache(tmp_path, KIB).writer(KIB + 1) is None


def test_many_threads_keep_and_find(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, 40 * KIB)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(10):
                key = put(cache, blob(seed * 3 + i % 4))
                found = cache.find(*key)
                assert found is None or bytes(found) == blob(seed * 3 + i % 4)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cache.used_bytes <= 40 * KIB
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == cache.used_bytes


# -- over the wire --------------------------------------------------------------------------------------------------


def upload(device: RpcDevice, gguf: GGUFFile, hashes: TensorHashes) -> int:
    """Send a model; the bytes that left for it."""
    buffer = device.alloc(gguf.size_bytes)
    before = device.link.dispatcher.stats().sent_bytes
    offset, places = 0, {}
    for name, info in gguf.tensors.items():
        hint = WeightHint(name, info.type, info.ne, lambda name=name: hashes.of(name))
        device.write(buffer, offset, gguf.data(name), hint=hint)
        places[name] = offset
        offset += info.n_bytes
    device.synchronize()
    sent = device.link.dispatcher.stats().sent_bytes - before
    for name, info in gguf.tensors.items():
        assert bytes(device.read(buffer, places[name], info.n_bytes).result()) == bytes(gguf.data(name))
    device.free(buffer)
    return sent


@pytest.mark.parametrize("version", [(7, 0), (6, 0)])
def test_a_second_upload_sends_next_to_nothing(model: Path, tmp_path: Path, version: tuple[int, int]) -> None:
    gguf = GGUFFile.open(model)
    hashes = TensorHashes(gguf, tmp_path / "hashes")
    settings = WorkerSettings(cache_dir=tmp_path / "cache", version=version)
    with tcp_worker(Adder(), settings=settings) as worker, connected(worker) as (device,):
        assert upload(device, gguf, hashes) > gguf.size_bytes
        if version == (7, 0):
            assert upload(device, gguf, hashes) < 0.02 * gguf.size_bytes
    if version == (7, 0):
        with tcp_worker(Adder(), settings=settings) as worker, connected(worker) as (device,):
            assert upload(device, gguf, hashes) < 0.02 * gguf.size_bytes


def test_a_worker_with_the_model_is_sent_next_to_nothing_at_once(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(model, copy)
    gguf = GGUFFile.open(copy)
    settings = WorkerSettings(model_dir=tmp_path / "models", hash_dir=tmp_path / "worker-hashes")
    with tcp_worker(Adder(), settings=settings) as worker:
        worker.wait_for_weights()
        with connected(worker) as (device,):
            assert upload(device, gguf, TensorHashes(gguf, tmp_path / "hashes")) < 0.02 * gguf.size_bytes


def test_a_worker_that_starts_again_hashes_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it never asks for the hash of the small tensor."""
    settings = WorkerSettings(model_dir=tmp_path / "models", hash_dir=tmp_path / "hashes")
    with tcp_worker(Adder(), settings=settings) as worker:
        worker.wait_for_weights()
    monkeypatch.setattr(tensor_hashes, "fnv1a64", lambda data: pytest.fail("computed again"))
    with tcp_worker(Adder(), settings=settings) as worker:
        worker.wait_for_weights()
        data = content("big.weight")
        assert worker.weights.find(fnv1a64(data), len(data)) is not None


def test_a_worker_that_keeps_nothing_is_not_asked(model: Path, tmp_path: Path) -> None:
    gguf = GGUFFile.open(model)
    with tcp_worker(Adder()) as worker, connected(worker) as (device,):
        upload(device, gguf, TensorHashes(gguf, tmp_path / "hashes"))
        assert "SET_TENSOR_HASH" not in device.link.dispatcher.stats().commands
