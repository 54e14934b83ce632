"""A graph as short text for snapshots: calls only, values and symbols renumbered, sizes folded in.

One line a call: ``%3: bf16[s0, s1] = aten.where(%0, %1, 0)``. Placeholders appear as ``x0``, ``x1`` ... where
they are read, with their type at the first use; symbol arithmetic is folded into the sizes and arguments that
use it. Strides, devices, keyword defaults and Inductor's names stay out, so that a snapshot survives a torch
release that only renames.
"""

from __future__ import annotations

import re
import textwrap

import torch
from torch.fx import Graph, Node

_SHORT = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "bool": "b8",
}


def graph_text(graph: Graph) -> str:
    """The calls of ``graph`` and what it returns."""
    return _Printer().text(graph)


class _Printer:
    def __init__(self) -> None:
        self.names: dict[Node, str] = {}
        self.symbols: dict[str, str] = {}
        self.inputs = 0

    def text(self, graph: Graph) -> str:
        lines = []
        for node in graph.nodes:
            if node.op == "output":
                lines.append(f"return {self.argument(node.args[0])}")
            elif node.op == "call_function" and not isinstance(node.meta.get("val"), torch.SymInt | int):
                operands = [self.argument(arg) for arg in node.args]
                operands += [
                    f"{key}={self.argument(arg)}"
                    for key, arg in node.kwargs.items()
                    if key not in ("device", "layout", "pin_memory", "requires_grad", "memory_format")
                ]
                call = f"{self.target(node)}({', '.join(operands)})"
                value = node.meta.get("val")
                if isinstance(value, torch.Tensor):
                    self.names[node] = f"%{sum(name.startswith('%') for name in self.names.values())}"
                    call = f"{self.names[node]}: {self.type(value)} = {call}"
                lines.append(call)
        return "\n".join(
            part for line in lines for part in textwrap.wrap(line, 100, subsequent_indent="    ")
        )

    def argument(self, arg: object) -> str:
        if isinstance(arg, Node):
            value = arg.meta.get("val")
            if isinstance(value, torch.SymInt | int):
                return self.renumber(str(value))
            if arg not in self.names:
                self.names[arg] = f"x{self.inputs}"
                self.inputs += 1
                return (
                    f"{self.names[arg]}: {self.type(value)}"
                    if isinstance(value, torch.Tensor)
                    else self.names[arg]
                )
            return self.names[arg]
        if isinstance(arg, list | tuple):
            return f"[{', '.join(map(self.argument, arg))}]"
        if isinstance(arg, torch.dtype):
            return _SHORT.get(str(arg).removeprefix("torch."), str(arg))
        return "end" if arg == 9223372036854775807 else repr(arg)

    def type(self, value: torch.Tensor) -> str:
        dtype = str(value.dtype).removeprefix("torch.")
        sizes = ", ".join(self.renumber(str(size)) for size in value.shape)
        return f"{_SHORT.get(dtype, dtype)}[{sizes}]"

    def renumber(self, expression: str) -> str:
        return re.sub(
            r"\b[su]\d+\b",
            lambda symbol: self.symbols.setdefault(symbol[0], f"s{len(self.symbols)}"),
            expression,
        )

    @staticmethod
    def target(node: Node) -> str:
        return str(node.target).removesuffix(".default").removesuffix(".Tensor")
