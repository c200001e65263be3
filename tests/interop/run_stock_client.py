"""Runs in the other venv: decode greedily with llama.cpp, its layers on RPC workers or here. One JSON argument."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def add_workers(endpoints: list[str]) -> None:
    libraries = Path(llama_cpp.__file__).parent / "lib"
    ggml = ctypes.CDLL(str(libraries / "libggml.so.0"))
    rpc = ctypes.CDLL(str(libraries / "libggml-rpc.so.0"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    rpc.ggml_backend_rpc_add_server.argtypes = [ctypes.c_char_p]
    ggml.ggml_backend_register.restype = None
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for endpoint in endpoints:
        ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))


def main(wish: dict[str, Any]) -> dict[str, Any]:
    add_workers(wish["endpoints"])
    llama = llama_cpp.Llama(
        wish["model"],
        n_ctx=512,
        n_batch=512,
        n_ubatch=wish.get("n_ubatch", 512),
        n_threads=1,
        n_gpu_layers=-1 if wish["endpoints"] else 0,
        flash_attn=wish.get("flash_attn", True),
        verbose=True,
    )
    n_vocab = llama.n_vocab()
    tokens, leads, best = [], [], []
    feed = wish["tokens"]
    for _ in range(wish["n_tokens"]):
        llama.eval(feed)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llama.ctx, -1), (n_vocab,))
        order = np.argsort(-logits, kind="stable")[:8]
        tokens.append(int(order[0]))
        leads.append(float(logits[order[0]] - logits[order[1]]))
        best.append([[int(i), float(logits[i])] for i in order])
        feed = [tokens[-1]]
    return {"tokens": tokens, "leads": leads, "best": best}


print(json.dumps(main(json.loads(sys.argv[1]))))
