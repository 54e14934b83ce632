"""The reasons for which a rewrite leaves a graph alone.

Each code stands for one obligation of the proof. A code is public: reports, tests and users refer to it, so
it is never renamed; a new obligation gets a new code. `Refuse` is raised by the functions that discharge
obligations and caught in one place, `ple_inductor.passes.pipeline`.
"""

from __future__ import annotations

from torch.fx import Node

from ple_inductor.passes.outcome import Miss

OBLIGATIONS = {
    # The anchor.
    "training": "the graph is not differentiated: a backward pass would need the padded tensors",
    "conv_not_1d": "the convolution runs along one dimension",
    "conv_transposed": "the convolution is not a transposed one",
    "conv_has_bias": "the convolution adds no bias",
    "conv_padded": "the convolution pads nothing: the history in front of the tokens is explicit",
    "conv_strided": "the convolution has stride 1: one output column a token",
    "conv_groups": "the convolution has one group a channel",
    "conv_weight": "the weight holds one filter a channel",
    "dtype_unsupported": "the tokens are bfloat16, float16 or float32",
    # From the anchor back to the ragged rows.
    "history_form": "the convolution reads cat([initial state, packed tokens])",
    "history_dim": "state and tokens are joined along the convolution's length",
    "history_order": "the state stands before the tokens",
    "state_length": "the state in front of the tokens has (K - 1) * dilation columns",
    "op_before_conv": "nothing but a change of layout lies between packing and the convolution",
    "packed_written": "nothing writes into the packed tokens after packing",
    "pack_form": "tokens are put with index_put, without accumulation, one row [C] at each (request, column)",
    "pack_fill": "the padded buffer is filled with zeros before packing",
    "pack_axes": "tokens are packed along the convolution's length",
    "pack_index": "(request, column) are those of query_start_loc",
    "initial_state_form": "the initial state is rows of a state pool, masked by request, or zeros",
    # From the anchor on to the ragged rows.
    "padded_escapes": "every use of a padded value ends in a gather at the packed (request, column)",
    "unpack_index": "the result is gathered at the (request, column) at which it was packed",
    "unpack_axes": "the result is gathered along requests and columns",
    "activation": "between the convolution and the gather there is SiLU, or nothing",
    "dtype_chain": "values are rounded to the tokens' dtype after the convolution and after the activation",
    "mask_form": "a mask on the result depends on the request, and on columns only to cut a request's end",
    # The new state.
    "state_gather": "the new state is the last S columns of history before each request's end",
    "state_write_form": "the new state goes into the pool by one index_put at the slots it was read from",
    "state_of_empty": "a request without tokens keeps its state",
    "state_pool": "the pool that is written is a graph input, and the one that was read",
    "state_mutated": "nothing else writes into the pool",
    "new_state_read": "nothing reads the new pool in the same graph",
    "operand_mutated": "nothing writes into an operand",
    # Not an obligation of the proof.
    "pass_raised": "the pass runs to its end",
}


class Refuse(Exception):
    """An obligation does not hold.

    Args:
        code: A key of `OBLIGATIONS`.
        node: The node at which the proof stopped.
        expected: What was needed there, more precise than the obligation.
        found: What the graph has instead.
    """

    def __init__(self, code: str, node: Node, expected: str, found: str) -> None:
        super().__init__(f"{code} at {node.name}: expected {expected}, found {found}")
        self.code, self.node, self.expected, self.found = code, node, expected, found

    def miss(self, name: str) -> Miss:
        """The record of this refusal for the rewrite ``name``."""
        return Miss(
            name=name,
            code=self.code,
            obligation=OBLIGATIONS[self.code],
            node=self.node.name,
            source=source_line(self.node),
            expected=self.expected,
            found=self.found,
        )


def source_line(node: Node) -> str:
    """The user's line behind ``node``, as ``file:line in function: code``; "" where torch kept none."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip()]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    if not frames:
        return ""
    where = lines[frames[-1]]
    file, _, rest = where.removeprefix('File "').partition('", line ')
    line, _, function = rest.partition(", in ")
    code = lines[frames[-1] + 1] if frames[-1] + 1 < len(lines) else ""
    return f"{file}:{line} in {function}" + (f": {code}" if code else "")
