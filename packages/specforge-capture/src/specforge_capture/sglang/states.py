"""Reading a target's hidden states out of an SGLang model during a prefill.

The states are those that the model hands to its logits processor. In process the processor is replaced by
one that keeps them, so that no logits are computed; in a server it stays and is watched. Layers in the middle
come through SGLang's own capture switch, `set_dspark_layers_to_capture` (post-layer ids) where the model has
it, else `set_dflash_layers_to_capture` (the same convention; SGLang shifts them by one itself). The latter
never yields the last layer, whose output is therefore read off the final norm: its input plus the residual.

Invariants: a prefill yields one column of [T, H] for each asked layer, in the asked order, checked each time;
and the vocabulary head applied to the final state gives the model's own logits, checked at the start.

Notation: T packed tokens, K captured layers, H hidden size, V vocabulary, n chosen tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor, LogitsProcessorOutput
from torch import Tensor, nn


@dataclass(frozen=True)
class _Handed:
    """What a model handed to its logits processor."""

    final: Tensor
    middle: Sequence[Tensor] | Tensor | None
    head: nn.Module
    batch: Any


class _KeepStates(nn.Module):
    """Stands in for a logits processor."""

    def __init__(self, keep: Callable[[_Handed], None]) -> None:
        super().__init__()
        self._keep = keep

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: nn.Module,
        logits_metadata: Any,
        aux_hidden_states: Sequence[Tensor] | Tensor | None = None,
        hidden_states_before_norm: Tensor | None = None,
    ) -> LogitsProcessorOutput:
        self._keep(_Handed(hidden_states, aux_hidden_states, lm_head, logits_metadata))
        return LogitsProcessorOutput(next_token_logits=None)


class StateReader:
    """Captures layers of one model.

    Args:
        model: an SGLang model with its weights.
        layer_ids: post-layer ids, 0-based; their order is the columns' order.
        num_layers: decoder layers of the model.
        hidden_size: H.
        serves: the model goes on computing logits, for a server's sampler.

    Raises:
        ValueError: if the model offers no way to capture what is asked for, or changes its logits behind the
            head.
    """

    def __init__(
        self,
        model: Any,
        layer_ids: Sequence[int],
        num_layers: int,
        hidden_size: int,
        *,
        serves: bool = False,
    ) -> None:
        self._layer_ids = tuple(layer_ids)
        self._width = hidden_size
        self._last: Tensor | None = None
        self._handed: _Handed | None = None
        parent, place, self._processor = _logits_processor(model)
        if serves:
            self._processor.register_forward_pre_hook(self._watch, with_kwargs=True)
        else:
            setattr(parent, place, _KeepStates(self._keep))
        name, last = type(model).__name__, num_layers - 1
        switched = sorted(self._layer_ids)
        if hasattr(model, "set_dspark_layers_to_capture"):
            model.set_dspark_layers_to_capture(switched)
        else:
            switched = [layer for layer in switched if layer != last]
            if not hasattr(model, "set_dflash_layers_to_capture"):
                raise ValueError(f"{name} has no switch to capture layers")
            if switched:
                model.set_dflash_layers_to_capture(switched)
            if last in self._layer_ids:
                _final_norm(model, num_layers).register_forward_pre_hook(self._keep_last)
        self._switched = switched

    def take(self, sample_ids: Sequence[str], kept: slice) -> tuple[Tensor, Tensor]:
        """States of the prefill that just ran: [n, K * H] and, after the final norm, [n, H]. Keeps nothing.

        Args:
            sample_ids: names of its rows, for errors.
            kept: which n of its T tokens are wanted. The model's columns are views of them until they are
                joined, so that what others want is never copied.

        Raises:
            ValueError: if the model yielded other columns than it was asked for.
        """
        *columns, whole = self.take_columns(sample_ids)
        final = whole[kept]
        if len(final) < len(whole):
            final = final.clone()
        return torch.cat([column[kept] for column in columns], dim=-1), final

    def take_columns(self, sample_ids: Sequence[str]) -> list[Tensor]:
        """`take`, as K + 1 tensors of [T, H]: each asked layer's, then the final state."""
        handed, last = self._handed, self._last
        self.discard()
        assert handed is not None
        middle = handed.middle if handed.middle is not None else ()
        if isinstance(middle, Tensor):
            middle = middle.split(self._width, dim=-1)
        columns = dict(zip(self._switched, middle, strict=False))
        if last is not None:
            columns[max(self._layer_ids)] = last
        shape = handed.final.shape
        found = [tuple(column.shape) for column in middle] + ([tuple(last.shape)] if last is not None else [])
        if len(middle) != len(self._switched) or found != [tuple(shape)] * len(self._layer_ids):
            raise ValueError(
                f"partial capture of {', '.join(sample_ids)}: asked for layers {list(self._layer_ids)} of "
                f"shape {tuple(shape)}, the model yielded {found}"
            )
        return [columns[layer] for layer in self._layer_ids] + [handed.final]

    @property
    def seen(self) -> bool:
        """Whether a forward has shown its states since the last `take` or `discard`."""
        return self._handed is not None

    def discard(self) -> None:
        """Keep nothing of the forward that just ran."""
        self._handed = self._last = None

    def take_with_logits(self, count: int) -> tuple[Tensor, Tensor]:
        """States [n, K * H] and logits [n, V] of the last `count` tokens of the prefill that just ran."""
        handed = self._handed
        assert handed is not None
        hidden, final = self.take(("an evaluated sequence",), slice(-count, None))
        metadata = LogitsMetadata.from_forward_batch(handed.batch)
        logits = self._processor._get_logits(final, handed.head, metadata)
        return hidden, logits

    def _keep(self, handed: _Handed) -> None:
        self._handed = handed

    def _watch(self, processor: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        found = inspect.signature(LogitsProcessor.forward).bind(processor, *inputs, **named).arguments
        self._keep(
            _Handed(
                found["hidden_states"],
                found.get("aux_hidden_states"),
                found["lm_head"],
                found["logits_metadata"],
            )
        )

    def _keep_last(self, norm: nn.Module, inputs: tuple[Any, ...]) -> None:
        hidden, *rest = inputs
        residual = rest[0] if rest else None
        # A copy either way: the fused norm writes its sum into the residual.
        self._last = hidden.clone() if residual is None else hidden + residual


def _logits_processor(model: nn.Module) -> tuple[nn.Module, str, LogitsProcessor]:
    """The model's logits processor, and where it lies: its parent and its name there."""
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, LogitsProcessor)
    ]
    if len(places) != 1:
        raise ValueError(f"{type(model).__name__} has {len(places)} logits processors; required: one")
    ((parent, name),) = places
    processor = getattr(parent, name)
    text = getattr(processor.config, "text_config", processor.config)
    changes = {
        "a soft cap": processor.final_logit_softcapping,
        "a scale": None if processor.logit_scale == 1 else processor.logit_scale,
        "a width multiplier": getattr(text, "logits_mup_width_multiplier", None),
    }
    if found := [f"{what} of {value}" for what, value in changes.items() if value]:
        raise ValueError(
            f"not implemented yet: targets whose logits are not the vocabulary head's "
            f"({type(model).__name__} has {', '.join(found)}), as the draft learns from the head alone"
        )
    return parent, name, processor


def _final_norm(model: nn.Module, num_layers: int) -> nn.Module:
    """The norm behind the decoder's last layer."""
    for module in model.modules():
        layers, norm = getattr(module, "layers", None), getattr(module, "norm", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers and isinstance(norm, nn.Module):
            return norm
    raise ValueError(
        f"{type(model).__name__} has no final norm behind {num_layers} layers to read "
        f"the last layer from; required: draft.target_layer_ids below {num_layers - 1}"
    )
