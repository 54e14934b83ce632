"""Operators that work on ragged rows: their contracts, their CPU lowering, their Triton kernels.

Nothing here knows of graphs that are rewritten.
"""

if __name__ != "ple_inductor.lowerings":
    raise ImportError(f"import ple_inductor.lowerings, not {__name__!r}")
