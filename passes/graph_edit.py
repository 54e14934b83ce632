"""Edit a graph so that every edit can be taken back.

New nodes are only added and uses only redirected until `commit`; nothing is erased before. So whatever raises
in between, `undo` gives the graph back node for node.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ple_inductor.passes.graph_facts import value


class GraphEdit:
    """The edits of one rewrite on ``graph``; new nodes carry ``anchor``'s source line."""

    def __init__(self, graph: Graph, anchor: Node) -> None:
        self.graph = graph
        self._anchor = anchor
        self._before = {node: (node.args, node.kwargs) for node in graph.nodes}
        self._doomed: list[Node] = []
        self._committed = False

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """A call of ``target`` at the graph's insertion point, with its fake value."""
        node = self.graph.call_function(target, args, kwargs)
        if (trace := self._anchor.meta.get("stack_trace")) is not None:
            node.meta["stack_trace"] = trace
        if target._schema.is_mutable:
            node.meta["val"] = None
            return node
        from torch._guards import detect_fake_mode

        operands = map_arg(args, value)
        fake_mode = detect_fake_mode(operands)
        if fake_mode is None:
            raise RuntimeError(f"no fake tensor among the operands of {target}")
        with fake_mode:
            node.meta["val"] = target(*operands, **kwargs)
        return node

    def replace(self, old: Node, new: Node) -> None:
        """Let every user of ``old`` read ``new``; ``old`` goes away on commit."""
        old.replace_all_uses_with(new)

    def erase(self, node: Node) -> None:
        """Erase ``node``, which nobody reads, on commit."""
        self._doomed.append(node)

    def commit(self) -> None:
        """Erase what is dead. Raises before the first erasure when the edited graph is not well formed."""
        self.graph.lint()
        self._committed = True
        for node in self._doomed:
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()

    def undo(self) -> None:
        """Give the graph back as it was; a graph that was committed is well formed and stays."""
        if self._committed:
            return
        for node, (args, kwargs) in self._before.items():
            if node.args != args:
                node.args = args
            if node.kwargs != kwargs:
                node.kwargs = kwargs
        for node in reversed(list(self.graph.nodes)):
            if node not in self._before:
                self.graph.erase_node(node)
