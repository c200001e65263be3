"""llama.cpp under many requests: libllama driven as its server drives it. Runs in an interpreter with llama-cpp-python.

Reads lines of JSON {"prompts", "n_tokens"} and answers {"seconds", "n_reused"}. As llama-server does: one sequence per
slot; a batch is one token for every slot that generates, then as much of the slots' prompts as 2,048 tokens hold, in
ubatches of 512; a free slot that shares most of its tokens with the next request takes it and keeps what they share.
Greedy, by numpy, from logits in place.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from dataclasses import dataclass, field

import llama_cpp as llama
import numpy as np

N_BATCH = 2048


@dataclass
class Slot:
    number: int
    cached: list[int] = field(default_factory=list)  # tokens whose keys and values it holds
    pending: list[int] = field(default_factory=list)  # tokens to compute
    n_left: int = 0  # tokens to generate
    row: int = -1  # of the batch, whose logits the next token comes from

    @property
    def is_free(self) -> bool:
        return self.n_left == 0


class Server:
    def __init__(self, path: str, n_threads: int, n_slots: int, n_ctx_slot: int) -> None:
        self._silence = llama.llama_log_callback(lambda *_: None)
        llama.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(path.encode(), model_params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_slots * n_ctx_slot, N_BATCH, 512
        params.n_seq_max = n_slots
        params.n_threads = params.n_threads_batch = n_threads
        self._context = llama.llama_init_from_model(self._model, params)
        self._memory = llama.llama_get_memory(self._context)
        self._n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(N_BATCH, 0, 1)
        self._slots = [Slot(number) for number in range(n_slots)]
        self.n_reused = 0

    def run(self, prompts: list[list[int]], n_tokens: int) -> float:
        """Seconds until all are answered; nothing is cached before."""
        llama.llama_memory_clear(self._memory, True)
        self.n_reused = 0
        for slot in self._slots:
            slot.cached = []
        waiting = list(prompts)
        began = time.perf_counter()
        while waiting or not all(slot.is_free for slot in self._slots):
            while waiting and any(slot.is_free for slot in self._slots):
                self._start(waiting.pop(0), n_tokens)
            self._step()
        return time.perf_counter() - began

    def _start(self, prompt: list[int], n_tokens: int) -> None:
        free = [slot for slot in self._slots if slot.is_free]
        slot = max(free, key=lambda one: common(one.cached, prompt))
        n = min(common(slot.cached, prompt), len(prompt) - 1)
        llama.llama_memory_seq_rm(self._memory, slot.number, n, -1)
        self.n_reused += n
        slot.cached, slot.pending, slot.n_left = prompt[:n], prompt[n:], n_tokens

    def _step(self) -> None:
        batch = self._batch
        n = 0
        for slot in sorted(self._slots, key=lambda one: len(one.pending)):  # generating ones first
            slot.row = -1
            if slot.is_free:
                continue
            taken = slot.pending[: N_BATCH - n]
            del slot.pending[: len(taken)]
            for token in taken:
                batch.token[n], batch.pos[n] = token, len(slot.cached)
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, slot.number
                batch.logits[n] = 0
                slot.cached.append(token)
                n += 1
            if taken and not slot.pending:
                slot.row = n - 1
                batch.logits[n - 1] = 1
        batch.n_tokens = n
        code = llama.llama_decode(self._context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode gave {code}")
        for slot in self._slots:
            if slot.row >= 0:
                row = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, slot.row), (self._n_vocab,))
                slot.pending = [int(row.argmax())]
                slot.n_left -= 1
                if slot.n_left == 0:
                    slot.pending = []


def common(a: list[int], b: list[int]) -> int:
    n = 0
    while n < len(a) and n < len(b) and a[n] == b[n]:
        n += 1
    return n


def main() -> None:
    path, n_threads, n_slots, n_ctx_slot = sys.argv[1], *map(int, sys.argv[2:5])
    server = Server(path, n_threads, n_slots, n_ctx_slot)
    print(json.dumps({"version": llama.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        seconds = server.run(asked["prompts"], asked["n_tokens"])
        print(json.dumps({"seconds": seconds, "n_reused": server.n_reused}), flush=True)


if __name__ == "__main__":
    main()
