"""``torch.compile(fn, backend="ple_inductor")``: stock Inductor with the rewrites.

torch finds `ple_inductor` through the package's entry point and calls it once a graph. All it does is to
put the pass into the configuration of this one compile; the user's configuration is not touched. Modes and
options are Inductor's own, handled by torch's own wrapper of Inductor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

# A graph out of a compile cache calls these operators without any pass having run.
from ple_inductor.lowerings import update_conv_state, varlen_short_conv  # noqa: F401
from ple_inductor.settings import is_off, read_options, without_own

_HOOK = "post_grad_custom_pre_pass"


def ple_inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile ``gm`` with Inductor and the rewrites.

    Under ``PLE_INDUCTOR=0`` this is stock Inductor to the letter.

    Args:
        gm: What Dynamo captured.
        example_inputs: Its inputs.
        mode: One of Inductor's, as ``torch.compile`` takes them.
        options: Inductor's, and ``ple_inductor.strict`` (bool): raise while compiling when a padded
            convolution is left as it is. Passes in ``post_grad_custom_pre_pass`` run before the rewrites.

    Returns:
        The compiled function.

    Raises:
        ValueError: An option is unknown; the text suggests the nearest one.
        TypeError: The value of an own option has the wrong type.
        StrictError: ``ple_inductor.strict`` is set and not everything was rewritten; the text is the report.

    A caller of the compiled function sees these wrapped by torch, with the same text.
    """
    if is_off():
        return stock(mode, without_own(options))(gm, example_inputs)
    from torch._inductor import config

    from ple_inductor import recompile_limit, report_store
    from ple_inductor.graph_pass import with_ours

    given = read_options(options)
    inductor = stock(mode, given.inductor)
    theirs = inductor.config.get(_HOOK, config.post_grad_custom_pre_pass)
    recompile_limit.watch()
    try:
        return inductor(gm, example_inputs, config_patches={_HOOK: with_ours(theirs, strict=given.strict)})
    finally:
        report_store.harvest()


def stock(mode: str | None, options: dict[str, Any]) -> Any:
    """What ``torch.compile(backend="inductor", mode=mode, options=options)`` calls with a graph."""
    return torch._TorchCompileInductorWrapper(mode, options, None)  # type: ignore[no-untyped-call]
