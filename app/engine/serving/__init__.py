"""Who runs when, and on which KV cells. Pure: no I/O, no threads, no clocks."""
