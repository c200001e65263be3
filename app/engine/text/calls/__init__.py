"""How model families write tool calls: one file per family."""
