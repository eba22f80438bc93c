"""The `hf` target: a transformers model, on a CPU or a GPU.

`capture` runs documents packed into one sequence, with position ids that restart and attention that never
crosses documents, through the decoder without its vocabulary head. Hooks copy the wanted layers' outputs into
one buffer as they appear; no other layer's states are kept. Post-layer id k is the output of decoder layer k
itself, also for the last layer (transformers' `hidden_states[-1]` would be the normed state).

Invariant, checked at load: the vocabulary head applied to the captured final state gives the model's own
logits.

Notation: T packed tokens, B documents, K captured layers, H hidden size, V vocabulary, n new tokens.
"""

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specforge_capture.memory import naming_budgets
from specforge_capture.targets.attention import Documents, Slots
from specforge_capture.targets.base import ALL, Extension, PromptRow, feature_batch, token_range
from specforge_capture.targets.cache import SlotCache
from specforge_capture.targets.loading import decoder_layers, load_model, random_model
from specforge_capture.targets.sequence import DecodedSequence, Recorder, SequenceSteps
from specforge_config.features import CaptureSpec, FeatureBatch

_CAPTURE_BUDGETS = "lower training.batch_size or data.max_length"


class HFTarget:
    """A transformers model that captures features under a contract and decodes for evaluation.

    Args:
        folder: a saved model.
        spec: the capture contract.
        device: where the model runs.
        stop_ids: tokens that end an answer.
        dummy_seed: makes random weights from this seed, the same on every rank, instead of reading any.
        record: makes decoding steps ones that are replayed; None runs them as they are.

    Raises:
        ValueError: if the folder holds no loadable model, or the model has no structure this backend can
            capture.
    """

    def __init__(
        self,
        folder: str | Path,
        spec: CaptureSpec,
        device: torch.device | str = "cpu",
        stop_ids: Sequence[int] = (),
        dummy_seed: int | None = None,
        record: Recorder | None = None,
    ) -> None:
        self.spec = spec
        self.stop_ids = tuple(stop_ids)
        self.device = torch.device(device)
        dtype = getattr(torch, spec.dtype)
        model = load_model(folder, dtype) if dummy_seed is None else random_model(folder, dtype, dummy_seed)
        self.model = model.to(self.device)
        self._decoder = self.model.get_decoder()
        self._head = self.model.get_output_embeddings()
        self._layers = _captured_layers(self.model, spec)
        self._idle: list[SequenceSteps] = []
        self._record = record
        self._check_head()

    @torch.no_grad()
    def capture(self, rows: Sequence[PromptRow], own: slice = ALL) -> FeatureBatch:
        """Capture the states of `rows`, packed in their order, and keep those of `rows[own]`.

        `no_grad` rather than inference mode: the trainer's autograd saves these states.

        Raises:
            ValueError: for an empty batch or row.
        """
        lengths = [len(row.input_ids) for row in rows]
        if not lengths or min(lengths) == 0:
            raise ValueError(
                f"nothing to capture in {[row.sample_id for row in rows]}: rows of {lengths} tokens"
            )
        tokens = torch.from_numpy(np.concatenate([row.input_ids for row in rows]).astype(np.int64))
        offsets = np.cumsum([0, *lengths])
        positions = torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))
        documents = Documents(
            tuple(offsets.tolist()),
            torch.from_numpy(offsets.astype(np.int32)).to(self.device),
            max(lengths),
        )
        with naming_budgets(f"capturing {len(tokens)} tokens", _CAPTURE_BUDGETS):
            hidden, last = self._forward(tokens, positions, documents=documents)
        if len(rows[own]) < len(rows):
            kept = token_range(rows, own)
            hidden, last = hidden[kept].clone(), last[kept].clone()
        return feature_batch(rows[own], hidden, last, self.spec)

    @contextmanager
    def decoding(self) -> Generator[bool]:
        """Decode on this rank, which needs no other."""
        yield True

    def start(self) -> DecodedSequence:
        """An empty sequence. It keeps every key, also of sliding layers, so that it can be cropped."""
        steps = self._idle.pop() if self._idle else SequenceSteps(self._decode, self.device, self._record)
        sequence = DecodedSequence(steps)
        weakref.finalize(sequence, self._idle.append, steps)
        return sequence

    @torch.no_grad()
    def extend(self, ids: Tensor, cache: DecodedSequence) -> Extension:
        """Append `ids` [n] int64 to the sequence."""
        logits, hidden = cache.steps.run(ids, cache.length)
        cache.length += len(ids)
        return Extension(logits, hidden)

    def crop(self, cache: DecodedSequence, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence."""
        cache.length = min(cache.length, length)

    def close(self) -> None:
        """Free the model's memory."""
        self._idle.clear()
        del self.model, self._decoder, self._head, self._layers
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _decode(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, slots: Slots | None
    ) -> tuple[Tensor, Tensor]:
        hidden, last = self._forward(ids, positions, past_key_values=cache, use_cache=True, slots=slots)
        return self._head(last), hidden

    def _forward(self, ids: Tensor, positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        """States of one sequence: [n, K * H] of the wanted layers, and [n, H] after the final norm."""
        width = self.spec.hidden_size
        hidden = torch.empty(
            len(ids),
            len(self.spec.layer_ids) * width,
            dtype=getattr(torch, self.spec.dtype),
            device=self.device,
        )
        options.setdefault("use_cache", False)
        with self._copying_into(hidden.split(width, dim=1)):
            output = self._decoder(
                input_ids=ids.to(self.device, non_blocking=True)[None],
                position_ids=positions.to(self.device, non_blocking=True)[None],
                **options,
            )
        return hidden, output.last_hidden_state[0]

    @contextmanager
    def _copying_into(self, columns: Sequence[Tensor]) -> Generator[None]:
        """While it lasts, each wanted layer writes its output into its column."""

        def hook_for(column: Tensor) -> Any:
            def copy(module: nn.Module, inputs: Any, output: Any) -> None:
                column.copy_((output[0] if isinstance(output, tuple) else output)[0])

            return copy

        wanted = zip(self.spec.layer_ids, columns, strict=True)
        handles = [self._layers[layer].register_forward_hook(hook_for(column)) for layer, column in wanted]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Compare head(final state) with the logits: caps and scales behind the head would break training."""
        ids = torch.arange(2, device=self.device)
        _, last = self._forward(ids, torch.arange(2))
        logits = self.model(input_ids=ids[None], use_cache=False).logits[0]
        if not torch.allclose(self._head(last).float(), logits.float(), rtol=1e-2, atol=1e-3):
            raise ValueError(
                f"target.backend hf: {type(self.model).__name__} changes its logits behind the vocabulary "
                "head (a soft cap or a scale); required: a target whose logits are the head's alone, for a "
                "draft learns from the head"
            )


def _captured_layers(model: PreTrainedModel, spec: CaptureSpec) -> nn.ModuleList:
    """The decoder's layers, after checking that they fit the contract."""
    layers = decoder_layers(model)
    found = {
        "layers": (len(layers) > max(spec.layer_ids), True),
        "hidden_size": (model.config.get_text_config().hidden_size, spec.hidden_size),
        "vocab_size": (model.get_output_embeddings().weight.shape[0], spec.vocab_size),
    }
    if wrong := {field: pair for field, pair in found.items() if pair[0] != pair[1]}:
        name = type(model).__name__
        raise ValueError(f"target.path: {name} does not fit the capture contract, (found, required): {wrong}")
    return layers
