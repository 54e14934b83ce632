"""What Inductor makes of the two operators: generated C++ on CPU, else calls; states are written in place.

May be changed: which devices get generated code. Must hold: ``register`` may be called any number of times;
the pool is never copied; whatever reads the old pool and is still lazy is given its place before the
write-back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.ir import TensorBox
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._inductor.virtualized import V

from ple_inductor.lowerings import (  # noqa: F401  (the contracts define the operators)
    _short_conv_inductor,
    update_conv_state,
    varlen_short_conv,
)

CONV = torch.ops.ple_inductor.varlen_short_conv.default
UPDATE = torch.ops.ple_inductor.update_conv_state.default


@functools.cache
def register() -> None:
    """Make Inductor lower the two operators; once per process, later calls do nothing."""
    register_lowering(CONV, type_promotion_kind=None)(lower_conv)
    register_lowering(UPDATE, type_promotion_kind=None)(lower_update)


def lower_conv(x_TC: TensorBox, *others: Any) -> Any:
    """Generated code on CPU; on other devices a call of the operator and of the kernel it has there."""
    if x_TC.get_device_or_error().type == "cpu":
        return _short_conv_inductor.lower(x_TC, *others)
    return _call(CONV, x_TC, *others)


def lower_update(conv_state: TensorBox, *others: Any) -> None:
    """A call of the operator, after every pending read of the pool.

    A lazy reader would otherwise be given its place where it is used, which may be behind the write.
    """
    pool = ir.ExternKernel.realize_input(conv_state)
    if pool.get_name() != conv_state.get_name():
        raise NotImplementedError(
            "conv_state is no strided view of a buffer, expected one to write into; pass the pool itself"
        )
    V.graph.mark_buffer_mutated(pool.get_name())
    _call(UPDATE, conv_state, *others)


def _call(operator: torch._ops.OpOverload, *arguments: Any) -> Any:
    handler: Any = fallback_handler(operator, add_to_fallback_set=False)  # type: ignore[no-untyped-call]
    return handler(*arguments)
