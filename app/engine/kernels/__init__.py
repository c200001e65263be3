"""Native kernels and their Python faces."""
