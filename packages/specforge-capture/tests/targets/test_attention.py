from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specforge_capture.targets.attention import Documents, packed_attention

LENGTHS = (1, 7, 20, 2)
HEADS, KV_HEADS, WIDTH = 4, 2, 8


def states(rows: int, heads: int) -> Tensor:
    return torch.randn(1, heads, rows, WIDTH, dtype=torch.float64)


def documents(lengths: tuple[int, ...]) -> Documents:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return Documents(tuple(offsets.tolist()), offsets.int(), max(lengths))


def reference(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Softmax over the allowed keys, written out; [1, n, Hq, D]."""
    key, value = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


def packed_reference(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float) -> Tensor:
    """`reference` over documents of `LENGTHS`."""
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    allowed = (document[:, None] == document) & (place[:, None] >= place)
    if window is not None:
        allowed &= place[:, None] - place < window
    return reference(query, key, value, allowed, scale)


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_documents_do_not_mix(window: int | None) -> None:
    total = sum(LENGTHS)
    query, key, value = states(total, HEADS), states(total, KV_HEADS), states(total, KV_HEADS)
    module: Any = SimpleNamespace(is_causal=True)
    found, _ = packed_attention(
        module, query, key, value, None, scaling=0.3, sliding_window=window, documents=documents(LENGTHS)
    )
    expected = packed_reference(query, key, value, window, 0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("new", "keys"), [(1, 1), (1, 9), (4, 9), (9, 9)])
def test_new_tokens_are_the_last_of_the_keys(new: int, keys: int, window: int | None) -> None:
    query, key, value = states(new, HEADS), states(keys, KV_HEADS), states(keys, KV_HEADS)
    distance = torch.arange(keys - new, keys)[:, None] - torch.arange(keys)
    allowed = (distance >= 0) & (distance < (window or keys))
    module: Any = SimpleNamespace(is_causal=True)
    found, _ = packed_attention(module, query, key, value, None, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(found, reference(query, key, value, allowed, 0.3), rtol=0, atol=1e-12)


@pytest.mark.parametrize("option", [{"softcap": 50.0}, {"s_aux": torch.zeros(HEADS)}])
def test_attention_that_cannot_be_packed_is_refused(option: dict[str, Any]) -> None:
    query, key = states(3, HEADS), states(3, KV_HEADS)
    module: Any = SimpleNamespace(is_causal=True)
    with pytest.raises(ValueError, match=next(iter(option))):
        packed_attention(module, query, key, key, None, documents=documents((3,)), **option)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="variable-length attention runs on CUDA")
@pytest.mark.parametrize("window", [None, 4, 20])
# bfloat16 keeps eight bits of the result.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_variable_length_attention_keeps_documents_apart(
    window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    total = sum(LENGTHS)
    packed = [states(total, heads).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    module: Any = SimpleNamespace(is_causal=True)
    offsets = documents(LENGTHS)
    on_device = Documents(offsets.offsets, offsets.cu_seqlens.cuda(), offsets.longest)
    found, _ = packed_attention(
        module, *(x.cuda() for x in packed), None, scaling=0.3, sliding_window=window, documents=on_device
    )
    expected = packed_reference(*(x.double() for x in packed), window, 0.3)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=tolerance, atol=tolerance)
