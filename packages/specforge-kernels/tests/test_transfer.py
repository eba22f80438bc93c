import numpy as np
import torch

from specforge_kernels.transfer import pack, to_device, unpack

ARRAYS = [
    np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
    np.array([0.5, -1, 7], np.float32),
    np.empty(0, np.int32),
    np.arange(5, dtype=np.int32),
]


def test_arrays_keep_order_shape_and_type() -> None:
    words = torch.from_numpy(pack(ARRAYS))
    for moved in (to_device(ARRAYS, torch.device("cpu")), unpack(words, ARRAYS)):
        for tensor, array in zip(moved, ARRAYS, strict=True):
            assert torch.equal(tensor, torch.from_numpy(array.copy()))


def test_each_array_starts_at_16_bytes() -> None:
    words = torch.from_numpy(pack(ARRAYS))
    assert words.numel() == 16
    assert [view.storage_offset() % 4 for view in unpack(words, ARRAYS)] == [0, 0, 0, 0]
