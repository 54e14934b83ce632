"""Graph in, graph out: find a padded subgraph, prove what it computes, rewrite it.

Nothing here knows of an inference engine, an environment variable or the command line.
"""

if __name__ != "ple_inductor.passes":
    raise ImportError(f"import ple_inductor.passes, not {__name__!r}")
