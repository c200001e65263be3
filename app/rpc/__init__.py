"""The ggml RPC wire: codec, dispatcher, remote device, worker."""
