"""The model's side of a capture server: on every tensor-parallel rank, the layers that each prefill shows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specforge_capture.sglang.states import StateReader
from specforge_config.features import CaptureSpec


class ServedModel:
    """The states of a served model's forwards, read where its logits processor gets them.

    Args:
        runner: SGLang's `ModelRunner` with its model loaded, before CUDA graphs are made.
        spec: the contract.

    Raises:
        ValueError: if the model is not the contract's, or its states cannot be captured.
    """

    def __init__(self, runner: Any, spec: CaptureSpec) -> None:
        config = runner.model_config
        found = {
            "hidden_size": (config.hidden_size, spec.hidden_size),
            "vocab_size": (config.vocab_size, spec.vocab_size),
            "dtype": (str(runner.dtype).removeprefix("torch."), spec.dtype),
        }
        wrong = [
            f"{name} is {has}; required: {wants}" for name, (has, wants) in found.items() if has != wants
        ]
        layers = config.num_hidden_layers
        if beyond := [layer for layer in spec.layer_ids if not 0 <= layer < layers]:
            wrong.append(f"layers {beyond} do not exist; required: from 0 to {layers - 1}")
        if wrong:
            raise ValueError("the model is not the contract's: " + "; ".join(wrong))
        self._reader = StateReader(runner.model, spec.layer_ids, layers, spec.hidden_size, serves=True)
        self._final = spec.final_state
        self._dtype = getattr(torch, spec.dtype)

    def discard(self) -> None:
        """Keep nothing of the last forward."""
        self._reader.discard()

    def columns(self, request_ids: Sequence[str], rows: int) -> list[Tensor]:
        """What the prefill that just ran showed: the contract's columns, [rows, H] each.

        Raises:
            RuntimeError: if the prefill was replayed from a CUDA graph, or shows other rows than it was for.
            ValueError: if the model yielded other columns than the contract's.
        """
        if not self._reader.seen:
            raise RuntimeError(
                "a prefill showed no states; required: prefills outside of CUDA graphs "
                "(--disable-prefill-cuda-graph)"
            )
        columns = self._reader.take_columns(request_ids)
        found = {(len(column), column.dtype) for column in columns}
        if found != {(rows, self._dtype)}:
            raise RuntimeError(f"a prefill showed (rows, dtype) {found}; required: {(rows, self._dtype)}")
        return columns if self._final else columns[:-1]
