TENSOR_BYTES: int

class Unsupported(ValueError): ...

class Program:
    """A compiled program."""

    @property
    def scratch_bytes(self) -> int:
        """Memory besides its buffers; programs of one engine share it."""
    @property
    def n_steps(self) -> int: ...
    @property
    def n_phases(self) -> int: ...
    def run(self) -> str:
        """Run once, without the GIL, in lane order. Returns what failed, or nothing."""
    def profile(self) -> list[tuple[int, float]]:
        """Run once; which node's step took how many seconds, in order. A node may have several steps."""

class Turn:
    """Bytes into a program's inputs, its run, and rows out of its results, in one call."""

    def run(self, items: memoryview, out: memoryview) -> str | None:
        """Once, without the GIL, in lane order. What failed, or nothing; None, and nothing done, if items lie outside.

        `items` is a sequence of `address u64 | size u32 | data`.
        """

class Engine:
    """Threads, interleaved weights and scratch of one device."""

    def __init__(self, variant: str, n_threads: int, pin: bool) -> None: ...
    def compile(self, tensors: bytes, nodes: list[int]) -> Program:
        """`tensors` are records of TENSOR_BYTES. Raises Unsupported with "index: reason"."""

    def turn(
        self, program: Program, base: int, inputs: int, inputs_bytes: int, rows: int, n_columns: int, wishes: bytes
    ) -> Turn:
        """Items may lie in `inputs_bytes` from `inputs` on, which callers call `base`; `rows` is f32[n, n_columns]."""

    def touch(self, begin: int, end: int, replaced: bool) -> None:
        """Bytes of these addresses are about to be read, or overwritten whole (`replaced`), from outside programs."""

    def forget(self, begin: int, end: int) -> None:
        """The memory of these addresses goes away."""

def variants() -> list[str]:
    """Names of the kernels this machine can run, the fastest first."""

def load_codebook(which: int, entries: bytes) -> None:
    """Hand over the entries of codebook `which`, int8 [n, 4 or 8]. The first call counts."""
