"""Recognise what is computed between the convolution and the gather: SiLU or nothing, and where it rounds.

The walk over padded values builds a term: the convolution's result, or an operator over terms and numbers.
Equal terms are equal values, so that both branches of a decomposed SiLU meet again here. Accepted spellings:
``silu(y)``, ``y * sigmoid(y)``, ``y / (1 + exp(-y))`` and ``y * (1 / (1 + exp(-y)))``, each in fp32 between
one conversion up and one back for bf16 and fp16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.fx import Node

from ple_inductor.passes.graph_facts import aten, is_op, prims
from ple_inductor.passes.refusal import Refuse


@dataclass(frozen=True)
class Op:
    """One operator of a term: its name, and its operands, terms or numbers."""

    name: str
    operands: tuple[object, ...] = ()
    dtype: torch.dtype | None = None


Term: TypeAlias = Op

CONV = Op("conv")

_NAMES = {
    aten.neg: "neg",
    aten.exp: "exp",
    aten.sigmoid: "sigmoid",
    aten.silu: "silu",
    aten.reciprocal: "reciprocal",
    aten.add: "add",
    aten.mul: "mul",
    aten.div: "div",
}


def elementwise(node: Node, operands: tuple[object, ...]) -> Term:
    """The term of ``node`` over ``operands``: terms for padded values, numbers as they are."""
    if is_op(node, prims.convert_element_type, aten._to_copy):
        return Op("cast", operands[:1], node.meta["val"].dtype)
    name = next((name for packet, name in _NAMES.items() if is_op(node, packet)), None)
    plain = name is not None and not (name in ("add", "div") and node.kwargs)
    return Op(name if plain and name is not None else str(node.target), operands)


def prove_activation(term: Term, dtype: torch.dtype, user: Node) -> str:
    """The activation, "silu" or "none", that ``term`` is in the tokens' ``dtype``; or a refusal."""
    if term == CONV:
        return "none"
    if term == Op("silu", (CONV,)):
        return "silu"
    low = dtype is not torch.float32
    wide = Op("cast", (CONV,), torch.float32) if low else CONV
    if low and term.name == "cast" and term.dtype is dtype:
        inner = term.operands[0]
    elif low:
        inner = None
    else:
        inner = term
    if inner in _silu_spellings(wide):
        return "silu"
    if _casts(term) - {torch.float32, dtype} or (low and _is_silu_of_some(term)):
        raise Refuse(
            "dtype_chain",
            user,
            f"the convolution's result rounded to {dtype}, SiLU in float32, rounded to {dtype}",
            _show(term),
        )
    raise Refuse("activation", user, "SiLU(conv), or conv", _show(term))


def _silu_spellings(y: Term) -> list[Term]:
    spellings = [Op("silu", (y,)), *_commuted("mul", y, Op("sigmoid", (y,)))]
    for denominator in _commuted("add", Op("exp", (Op("neg", (y,)),)), 1):
        spellings.append(Op("div", (y, denominator)))
        for inverse in (Op("reciprocal", (denominator,)), Op("div", (1, denominator))):
            spellings += _commuted("mul", y, inverse)
            spellings += _commuted("mul", y, Op("mul", (inverse, 1)))
    return spellings


def _commuted(name: str, left: object, right: object) -> list[Term]:
    return [Op(name, (left, right)), Op(name, (right, left))]


def _casts(term: object) -> set[torch.dtype]:
    if not isinstance(term, Op):
        return set()
    found = {term.dtype} if term.dtype is not None else set()
    return found.union(*map(_casts, term.operands)) if term.operands else found


def _is_silu_of_some(term: Term) -> bool:
    """Whether ``term`` is SiLU over some chain of casts, so that only the rounding is wrong."""
    bare = _without_casts(term)
    return bare == CONV or bare in _silu_spellings(CONV)


def _without_casts(term: object) -> object:
    if not isinstance(term, Op):
        return term
    operands = tuple(map(_without_casts, term.operands))
    return operands[0] if term.name == "cast" else Op(term.name, operands)


def _show(term: object) -> str:
    if not isinstance(term, Op):
        return str(term)
    if term.name == "cast":
        return f"{_show(term.operands[0])}.to({str(term.dtype).removeprefix('torch.')})"
    return f"{term.name}({', '.join(map(_show, term.operands))})" if term.operands else term.name
