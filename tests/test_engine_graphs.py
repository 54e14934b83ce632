"""The rewritten graph of every affected engine body, pinned as text."""

from __future__ import annotations

import itertools

import pytest
from engine_bodies import BODIES, call_body, load_body
from expecttest import assert_expected_inline
from padded_variants import inputs
from recorded import record


def snapshot(release: str, vendor: str, layout: str = "SD", width: int | None = None, **kwargs) -> str:
    """The rewritten graph of one body, compiled on sizes that collide with nothing."""
    x_TC, bounds, max_len, weight_CK, pool, *rest = inputs([5, 0, 17, 3, 2], width=width)
    if layout == "SD":
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    recorded = record(
        load_body(release, vendor),
        x_TC,
        bounds,
        max_len,
        weight_CK,
        pool,
        *rest,
        call=call_body,
        codegen=False,
        **kwargs,
    )
    assert recorded.codes == []
    (text,) = recorded.snapshots
    assert len(text.splitlines()) <= 40
    return text


def test_vllm_0_29_nvidia():
    assert_expected_inline(
        snapshot("0.29.0", "nvidia"),
        """\
%0: i32[s1 + 1] = aten.slice(x0: i32[s0], 0, -s1 - 1, end)
%1: i32[s1 + 1] = aten.sub(%0, s2)
%2: i64[s1 + 1] = prims.convert_element_type(%1, i64)
%3: i64[s1] = aten.slice(%2, 0, 1, end)
%4: i64[s1] = aten.slice(%2, 0, 0, -1)
%5: i64[s1] = aten.sub(%3, %4)
%6: i64[s1] = aten.slice(x1: i64[s3], 0, 0, s1)
%7: b8[s1] = aten.ne.Scalar(%6, 0)
%8: b8[s1] = aten.slice(x2: b8[s3], 0, 0, s1)
%9: b8[s1] = aten.bitwise_and(%7, %8)
%10: i64[s1] = aten.full([s1], 0, dtype=i64)
%11: i64[s1] = aten.where.self(%7, %6, %10)
%12: bf16[s4, s5] = ple_inductor.varlen_short_conv(x3: bf16[s4, s5], x4: bf16[s5, s6], %1, x5:
    bf16[s7, s5, s8], %11, %9, %7, s9, 'silu')
%13: b8[s1] = aten.gt.Scalar(%5, 0)
%14: b8[s1] = aten.bitwise_and(%7, %13)
ple_inductor.update_conv_state(x5, x3, %1, %11, %9, %14, s8)
return [%12]""",
    )


def test_vllm_0_31_amd():
    assert_expected_inline(
        snapshot("0.31.0", "amd"),
        """\
%0: i64[s0 + 1] = prims.convert_element_type(x0: i32[s0 + 1], i64)
%1: i64[s0] = aten.slice(%0, 0, 1, end)
%2: i64[s0] = aten.slice(%0, 0, 0, -1)
%3: i64[s0] = aten.sub(%1, %2)
%4: i64[s0] = aten.slice(x1: i64[s1], 0, 0, s0)
%5: b8[s0] = aten.ne.Scalar(%4, 0)
%6: b8[s0] = aten.slice(x2: b8[s1], 0, 0, s0)
%7: b8[s0] = aten.bitwise_and(%5, %6)
%8: i64[s0] = aten.full([s0], 0, dtype=i64)
%9: i64[s0] = aten.where.self(%5, %4, %8)
%10: bf16[s2, s3] = ple_inductor.varlen_short_conv(x3: bf16[s2, s3], x4: bf16[s3, s4], x0, x5:
    bf16[s5, s3, s6], %9, %7, %5, s7, 'silu')
%11: b8[s0] = aten.gt.Scalar(%3, 0)
%12: b8[s0] = aten.bitwise_and(%5, %11)
ple_inductor.update_conv_state(x5, x3, x0, %9, %7, %12, s6)
return [%10]""",
    )


def test_vllm_0_31_amd_static():
    assert_expected_inline(
        snapshot("0.31.0", "amd", dynamic=False),
        """\
%0: i64[6] = prims.convert_element_type(x0: i32[6], i64)
%1: i64[5] = aten.slice(%0, 0, 1, end)
%2: i64[5] = aten.slice(%0, 0, 0, -1)
%3: i64[5] = aten.sub(%1, %2)
%4: b8[5] = aten.ne.Scalar(x1: i64[5], 0)
%5: b8[5] = aten.bitwise_and(%4, x2: b8[5])
%6: i64[5] = aten.full([5], 0, dtype=i64)
%7: i64[5] = aten.where.self(%4, x1, %6)
%8: bf16[27, 20] = ple_inductor.varlen_short_conv(x3: bf16[27, 20], x4: bf16[20, 4], x0, x5:
    bf16[12, 20, 9], %7, %5, %4, 3, 'silu')
%9: b8[5] = aten.gt.Scalar(%3, 0)
%10: b8[5] = aten.bitwise_and(%4, %9)
ple_inductor.update_conv_state(x5, x3, x0, %7, %5, %10, 9)
return [%8]""",
    )


@pytest.mark.parametrize(("release", "vendor"), BODIES)
def test_nothing_padded_is_left_in_any_body_layout_or_width(release, vendor):
    for layout, width in itertools.product(("SD", "DS"), (None, 14)):
        text = snapshot(release, vendor, layout, width)
        assert text.count("ple_inductor.varlen_short_conv(") == 1
        assert text.count("ple_inductor.update_conv_state(") == 1
        for gone in ("convolution", "aten.cat", "index_put", "copy_", "gather", "clone"):
            assert gone not in text
