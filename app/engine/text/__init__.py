"""Text in and out of tokens. Pure: no I/O, no threads, no clocks."""
