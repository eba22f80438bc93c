import numpy as np
import torch

from specforge_kernels.transfer import to_device


def test_arrays_keep_order_shape_and_type() -> None:
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.array([0.5, -1], np.float32),
        np.empty(0, np.int32),
    ]
    moved = to_device(arrays, torch.device("cpu"))
    for tensor, array in zip(moved, arrays, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.copy()))
