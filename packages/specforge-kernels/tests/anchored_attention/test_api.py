"""Every backend that runs on this machine against the rule written slot by slot in float64."""

import os

import pytest
import torch

from specforge_kernels.anchored_attention import sdpa
from specforge_kernels.anchored_attention.api import anchored_attention, build_layout

# (backend, device, dtype, bound on the relative error); in bf16 outputs and gradients carry 8 bits.
PLACES = [
    (backend, "cpu", dtype, bound)
    for backend in ("reference", "sdpa")
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2))
]
if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES = [("triton", "cpu", torch.float32, 1e-5)]
elif torch.cuda.is_available():
    PLACES += [(backend, "cuda", torch.bfloat16, 1e-2) for backend in ("sdpa", "flex", "triton")]

CASES = {
    # documents, anchors, block, query heads, key heads, head dimension, window
    "gqa-packed": ((5, 1, 17, 40), (0, 2, 3, 5, 6, 9, 22, 23, 24, 47, 62), 7, 4, 2, 16, None),
    "mha": ((33,), (0, 1, 15, 31, 32), 4, 3, 3, 16, None),
    "one-kv-head": ((20, 20), (3, 19, 20, 39), 5, 4, 1, 32, None),
    "window": ((50, 30), (0, 3, 12, 30, 49, 50, 64, 79), 4, 4, 2, 16, 9),
    "window-is-block": ((30,), (0, 10, 29), 4, 2, 2, 16, 4),
    "block-of-one": ((12,), (0, 5, 11), 1, 2, 1, 16, None),
    "over-one-tile": ((210, 90), tuple(range(0, 300, 15)), 7, 2, 1, 16, None),
}


def attend(case, backend):
    device = case.inputs[0].device
    layout = build_layout(
        case.offsets, case.anchors, case.block, window=case.window, device=device, backend=backend
    )
    return anchored_attention(*case.inputs, layout)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch) -> None:
    """Tiles so small that these cases need several; on a GPU, Triton's tiles are what they are in use."""
    monkeypatch.setattr(sdpa, "TILE_SLOTS", 20)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from specforge_kernels.anchored_attention import triton

        for name, value in (("TILE_ROWS", 64), ("KEYS", 16), ("BACKWARD_ROWS", 32)):
            monkeypatch.setattr(triton, name, value)


@pytest.mark.parametrize(("backend", "device", "dtype", "bound"), PLACES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_follow_the_rule(
    name, backend, device, dtype, bound, draw_case, attend_by_slot
) -> None:
    torch.manual_seed(1)
    case = draw_case(*CASES[name], dtype=dtype, device=device)
    expected = attend_by_slot(case)
    upstream = torch.randn_like(expected).to(dtype)
    wanted = torch.autograd.grad(expected, case.inputs, upstream.double())
    out = attend(case, backend)
    found = torch.autograd.grad(out, case.inputs, upstream)
    assert out.dtype == dtype
    for value, reference in zip((out, *found), (expected, *wanted), strict=True):
        error = (value.double() - reference.double()).norm().item()
        assert error <= bound * reference.double().norm().item()


@pytest.mark.parametrize(("backend", "device", "dtype", "bound"), PLACES)
def test_no_leak_across_blocks_or_past_the_anchor(backend, device, dtype, bound, draw_case) -> None:
    # Anchors 10 and 12, block 4: a block ignores context from its anchor on, and the other block.
    torch.manual_seed(3)
    case = draw_case((20,), (10, 12), 4, 2, 1, 16, None, dtype=dtype, device=device)
    layout = build_layout(case.offsets, case.anchors, 4, device=device, backend=backend)
    before = anchored_attention(*case.inputs, layout).split(4)

    def changed(tensor: int, position: int) -> list[bool]:
        inputs = [x.detach().clone() for x in case.inputs]
        inputs[tensor][position] += 1
        after = anchored_attention(*inputs, layout).split(4)
        return [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]

    for tensor in (1, 2):
        assert changed(tensor, 9) == [True, True]
        assert changed(tensor, 10) == changed(tensor, 11) == [False, True]
        assert changed(tensor, 12) == changed(tensor, 19) == [False, False]
    for tensor in (3, 4):
        assert changed(tensor, 3) == [True, False]
        assert changed(tensor, 4) == [False, True]


def test_scale_is_applied(draw_case) -> None:
    torch.manual_seed(4)
    case = draw_case((9,), (3, 8), 2, 2, 2, 16, None)
    layout = build_layout(case.offsets, case.anchors, 2)
    q, *rest = case.inputs
    scaled = anchored_attention(q, *rest, layout, scale=0.5)
    torch.testing.assert_close(scaled, anchored_attention(2 * q, *rest, layout, scale=0.25))
    assert not torch.allclose(scaled, anchored_attention(q, *rest, layout))


def test_no_anchors_give_no_rows_and_finite_gradients(draw_case) -> None:
    case = draw_case((6,), (), 4, 2, 1, 16, None)
    layout = build_layout(case.offsets, case.anchors.long(), 4)
    out = anchored_attention(*case.inputs, layout)
    assert out.shape == (0, 2, 16)
    out.sum().backward()
    assert case.inputs[0].grad.shape == (0, 2, 16)


def test_disagreeing_shapes_are_refused(draw_case) -> None:
    case = draw_case((9,), (3, 8), 2, 4, 2, 16, None)
    layout = build_layout(case.offsets, case.anchors, 2)
    q, k_context, v_context, k_block, v_block = case.inputs
    with pytest.raises(ValueError, match="layout is for 4 slots over 9 tokens, found 4 over 8"):
        anchored_attention(q, k_context[:8], v_context[:8], k_block, v_block, layout)
    with pytest.raises(ValueError, match="keys and values disagree"):
        anchored_attention(q, k_context, v_context, k_block[:3], v_block, layout)
    with pytest.raises(ValueError, match="not a multiple of 2 key heads"):
        anchored_attention(q[:, :3], k_context, v_context, k_block, v_block, layout)
    with pytest.raises(ValueError, match="unknown attention backend 'flush'"):
        build_layout(case.offsets, case.anchors, 2, backend="flush")
