"""Prove that nothing writes into an operand of the new operators.

In a functional graph a write to a graph input is a ``copy_`` into it at the end, or an operator with a
mutable schema. The new operators read their operands at another place than the padded code did, so an
operand that is also written is refused, whatever the order: node order in a functional graph proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from ple_inductor.passes.graph_facts import describe
from ple_inductor.passes.refusal import Refuse


def prove_unmutated(graph: Graph, operands: Iterable[Node], own_copy: Node | None) -> None:
    """Refuse when ``graph`` writes into memory that one of ``operands`` views; ``own_copy`` may."""
    bases = {memory_of(operand) for operand in operands}
    for node in graph.nodes:
        if node is own_copy:
            continue
        for written in _written(node):
            if memory_of(written) in bases:
                raise Refuse("operand_mutated", node, f"no write into {written.name}", describe(node))


def memory_of(node: Node) -> Node:
    """The node whose memory ``node`` views: itself, or what is behind a chain of views."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        first = node.args[0] if node.args else None
        views = len(returns) == 1 and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if not views and "reshape" not in str(node.target):
            break
        if not isinstance(first, Node):
            break
        node = first
    return node


def _written(node: Node) -> list[Node]:
    """The operands that ``node`` writes into."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return []
    arguments = target._schema.arguments
    written = []
    for position, parameter in enumerate(arguments):
        if parameter.alias_info is None or not parameter.alias_info.is_write:
            continue
        given = node.kwargs.get(parameter.name, node.args[position] if position < len(node.args) else None)
        candidates = given if isinstance(given, list | tuple) else [given]
        written += [candidate for candidate in candidates if isinstance(candidate, Node)]
    return written
