"""Runs in the other venv: serve this machine's CPU by llama.cpp's own RPC worker. ENDPOINT [N_DEVICES [CACHE_DIR]]."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path


def main(endpoint: str, n_devices: str = "1", cache_dir: str = "") -> None:
    spec = importlib.util.find_spec("llama_cpp")
    assert spec is not None and spec.origin is not None
    libraries = Path(spec.origin).parent / "lib"
    # the names with .0 are those that the libraries know each other by: any other file would be a second copy
    for name in ("libggml-base.so.0", "libggml-cpu.so.0"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(libraries / "libggml.so.0"), mode=ctypes.RTLD_GLOBAL)
    rpc = ctypes.CDLL(str(libraries / "libggml-rpc.so.0"))
    ggml.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    ggml.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    count = int(n_devices)
    devices = (ctypes.c_void_p * count)(*[ggml.ggml_backend_dev_by_name(b"CPU")] * count)
    serve = rpc.ggml_backend_rpc_start_server
    serve.restype = None
    serve.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    serve(endpoint.encode(), cache_dir.encode() or None, 1, count, devices)


main(*sys.argv[1:])
