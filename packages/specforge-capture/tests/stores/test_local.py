import pytest
import torch

from specforge_capture.stores.local import LocalStore
from specforge_config.features import CaptureSpec, FeatureBatch


def batch_of(rows: int, spec: CaptureSpec) -> FeatureBatch:
    return FeatureBatch(
        tokens=torch.zeros(rows, dtype=torch.int64),
        loss_mask=torch.ones(rows, dtype=torch.bool),
        cu_seqlens=torch.tensor([0, rows]),
        hidden=torch.zeros(rows, len(spec.layer_ids) * spec.hidden_size),
        last_hidden=torch.zeros(rows, spec.hidden_size),
        sample_ids=("a:1",),
        positions=((0, 0),),
        spec=spec,
    )


def test_a_batch_is_handed_out_once(spec: CaptureSpec) -> None:
    store, batch = LocalStore(), batch_of(3, spec)
    store.put(batch)
    assert store.take() is batch
    with pytest.raises(RuntimeError, match="nothing is staged"):
        store.take()


def test_only_one_batch_is_staged(spec: CaptureSpec) -> None:
    store = LocalStore()
    store.put(batch_of(3, spec))
    with pytest.raises(RuntimeError, match=r"\['a:1'\] are still staged"):
        store.put(batch_of(3, spec))


def test_bytes_are_those_of_the_largest_batch(spec: CaptureSpec) -> None:
    store = LocalStore()
    for rows in (3, 5, 2):
        store.put(batch_of(rows, spec))
        store.take()
    assert store.staged_bytes == 5 * 4 * 32 * 4
    store.reset()
    assert store.staged_bytes == 0
