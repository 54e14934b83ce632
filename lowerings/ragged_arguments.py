"""What both operators demand of their arguments, checked alike for real, fake and symbolic tensors.

Shapes, dtypes and devices are checked; values of the index vectors never are (that would wait for the
device). Each failure is a ``ValueError`` of one line: what is wrong, what was expected, what to do. A
condition on a symbolic size becomes a guard of the compiled graph, as for an operator of torch.

May be changed: wording, more checks. Must hold: no read of a tensor's content, no import beyond torch.
"""

from __future__ import annotations

import torch
from torch import SymInt, Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
INTEGERS = (torch.int32, torch.int64)


def require(condition: bool | torch.SymBool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``condition`` holds."""
    torch._check_value(condition, lambda: message)  # type: ignore[no-untyped-call]


def require_tensor(
    name: str, value: Tensor, like: Tensor, rank: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """``value`` has one of ``dtypes``, ``rank`` dimensions and the device of ``like``."""
    allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    require(value.dtype in dtypes, f"{name} has dtype {value.dtype}, expected {allowed}; convert it")
    require(value.dim() == rank, f"{name} has {value.dim()} dimensions, expected {rank}; reshape it")
    require(
        value.device == like.device,
        f"{name} is on {value.device} but x is on {like.device}; move one of them",
    )


def require_requests(
    x_TC: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor | None,
    **flags: Tensor | None,
) -> None:
    """Packed tokens with their bounds, slots and per-request flags; ``None`` stands for an absent vector."""
    require_tensor("x", x_TC, x_TC, 2, FLOATS)
    require_tensor("query_start_loc", query_start_loc, x_TC, 1, INTEGERS)
    require(
        query_start_loc.shape[0] >= 1, "query_start_loc is empty, expected N + 1 bounds; pass [0] for N = 0"
    )
    requests = query_start_loc.shape[0] - 1
    vectors: dict[str, tuple[Tensor | None, tuple[torch.dtype, ...]]] = {
        "state_indices": (state_indices, INTEGERS),
        **{name: (flag, (torch.bool,)) for name, flag in flags.items()},
    }
    for name, (vector, dtypes) in vectors.items():
        if vector is not None:
            require_tensor(name, vector, x_TC, 1, dtypes)
            require(
                vector.shape[0] == requests,
                f"{name} has {vector.shape[0]} entries for {requests} requests; pass one entry for each",
            )


def require_pool(x_TC: Tensor, conv_state: Tensor, state_len: int | SymInt) -> None:
    """A state pool [slots, C, W] with room for ``state_len`` columns."""
    require_tensor("conv_state", conv_state, x_TC, 3, FLOATS)
    require(
        conv_state.shape[1] == x_TC.shape[1],
        f"conv_state has {conv_state.shape[1]} channels but x has {x_TC.shape[1]}; "
        "pass the pool as [slots, channels, width]",
    )
    require(
        conv_state.shape[2] >= state_len,
        f"conv_state is {conv_state.shape[2]} columns wide, expected at least {state_len}; pass a wider pool",
    )
