"""Readable numpy kernels for ggml's ops: the oracle every faster kernel is compared with.

A binder turns one placed node into a closure that computes it; views over the buffers are made once, when a program is
prepared. Activations are float32 throughout and sums are float32 or wider. Arrays have ggml's dimensions in reverse
order: a tensor [n0, n1, n2, n3] is an array [n3, n2, n1, n0].
"""
