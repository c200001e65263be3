"""GGUF files: reading, quantized types, and a small writer for tests."""
