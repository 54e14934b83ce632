"""Small facts about a node: its value, its operator, sizes that are provably equal.

Sizes are compared by what the shape environment already knows: a size that cannot be proven equal counts as
different. Only `same_or_guarded` adds a guard, and only one that holds at this compile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

aten = torch.ops.aten
prims = torch.ops.prims

INTEGERS = (torch.int32, torch.int64)


def value(node: object) -> Any:
    """The fake tensor or symbolic number of ``node``; a plain number stands for itself."""
    return node.meta["val"] if isinstance(node, Node) else node


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of ``node``, or None where it is something else."""
    found = node.meta.get("val") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def shape(node: Node) -> tuple[Any, ...]:
    """The sizes of a tensor node."""
    return tuple(node.meta["val"].shape)


def same(left: object, right: object) -> bool:
    """Whether two sizes (numbers, symbols, or nodes that hold one) are provably equal."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    left, right = value(left), value(right)
    return left is right or statically_known_true(left == right)


def same_sizes(left: Node, right: Node) -> bool:
    """Whether two tensors provably have the same sizes."""
    sizes = shape(left), shape(right)
    return len(sizes[0]) == len(sizes[1]) and all(map(same, *sizes))


def same_or_guarded(left: object, right: object) -> bool:
    """Whether two sizes are equal at this compile; where no proof is, the compiled code is guarded on it."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    if same(left, right):
        return True
    left, right = value(left), value(right)
    # Unequal sizes must not be compared by the guard: it would be one that asks for inequality.
    hints = {_hint(left), _hint(right)}
    return len(hints) == 1 and None not in hints and guard_or_false(left == right)


def _hint(size: Any) -> int | None:
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.hint if size.node.has_hint() else None


def is_op(node: object, *targets: object) -> bool:
    """Whether ``node`` calls one of ``targets``, given as overloads or as overload packets."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", None)
    return node.target in targets or packet in targets


def argument(node: Node, name: str) -> Any:
    """The argument ``name`` of an operator's call, wherever it was passed; its default where it was not."""
    schema = node.target._schema  # type: ignore[union-attr]
    for position, parameter in enumerate(schema.arguments):
        if parameter.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            if position < len(node.args):
                return node.args[position]
            return parameter.default_value
    raise KeyError(f"{node.target} has no argument {name}")


def iota_length(node: object) -> object | None:
    """The length of ``node`` when it is 0, 1, 2, ...; None when it is not."""
    if is_op(node, prims.iota) and argument(node, "start") == 0 and argument(node, "step") == 1:  # type: ignore[arg-type]
        return argument(node, "length")  # type: ignore[arg-type]
    return None


def without_int_cast(node: Node) -> Node:
    """``node`` before any conversion between integer types that keeps every value."""
    while is_op(node, prims.convert_element_type, aten._to_copy, aten.clone):
        origin = node.args[0]
        before, after = tensor(origin), tensor(node)
        if before is None or after is None or before.dtype not in INTEGERS or after.dtype not in INTEGERS:
            break
        if after.dtype.itemsize < before.dtype.itemsize:
            break
        assert isinstance(origin, Node)
        node = origin
    return node


def describe(node: object) -> str:
    """A node in a reader's words: operator, dtype and sizes."""
    if not isinstance(node, Node):
        return repr(node)
    name = str(node.target) if node.op == "call_function" else f"{node.op} {node.name}"
    found = tensor(node)
    if found is None:
        return name
    sizes = ", ".join(str(size) for size in found.shape)
    return f"{name} {str(found.dtype).removeprefix('torch.')}[{sizes}]"
