"""llama.cpp under measurement: a process that answers commands on stdin with seconds. See `bench.measured`.

Runs in an interpreter that has llama-cpp-python, and imports nothing else of this repository.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as llama

#: What prompts go in over workers: the size that was fastest over two.
_WORKERS_UBATCH_TOKENS = 256


def add_workers(endpoints: Sequence[str]) -> None:
    """Make the devices of ggml's RPC workers known."""
    libraries = Path(llama.__file__).parent / "lib"
    ggml = ctypes.CDLL(str(libraries / "libggml.so.0"))
    rpc = ctypes.CDLL(str(libraries / "libggml-rpc.so.0"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.restype = None
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for endpoint in endpoints:
        ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))


class Context:
    """A model here, or with all layers on ggml's RPC workers."""

    def __init__(self, path: str, n_threads: int, n_ctx: int, endpoints: Sequence[str] = ()) -> None:
        self._silence = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama.llama_backend_init()
        add_workers(endpoints)
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 999 if endpoints else 0
        self._model = llama.llama_model_load_from_file(path.encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch = n_ctx, 2048
        params.n_ubatch = _WORKERS_UBATCH_TOKENS if endpoints else 512
        params.n_threads = params.n_threads_batch = n_threads
        self._context = llama.llama_init_from_model(self._model, params)
        self._n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._n_threads = n_threads
        self.n_past = 0

    def fill(self, n_tokens: int) -> None:
        """Prompts with all cores, whatever is measured afterwards."""
        n_cores = len(os.sched_getaffinity(0))
        llama.llama_set_n_threads(self._context, self._n_threads, n_cores)
        for begin in range(0, n_tokens, 512):
            self.step(min(512, n_tokens - begin))
        llama.llama_set_n_threads(self._context, self._n_threads, self._n_threads)

    def forget(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        self.n_past = 0

    def step(self, n_tokens: int) -> None:
        tokens = [(self.n_past + i) * 7919 % self._n_vocab for i in range(n_tokens)]
        array = (llama.llama_token * n_tokens)(*tokens)
        code = llama.llama_decode(self._context, llama.llama_batch_get_one(array, n_tokens))
        if code != 0:
            raise RuntimeError(f"llama_decode gave {code}")
        llama.llama_get_logits(self._context)
        self.n_past += n_tokens


def main() -> None:
    path, n_threads, n_ctx = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    context = Context(path, n_threads, n_ctx, sys.argv[4].split(",") if len(sys.argv) > 4 else ())
    print("ready", llama.__version__, flush=True)
    for line in sys.stdin:
        command, n = line.split()
        if command == "forget":
            context.forget()
            print("0 0", flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        if command == "prompt":
            context.step(int(n))
        elif command == "fill":
            context.fill(int(n))
        else:
            for _ in range(int(n)):
                context.step(1)
        print(time.perf_counter() - wall, time.process_time() - cpu, flush=True)


if __name__ == "__main__":
    main()
