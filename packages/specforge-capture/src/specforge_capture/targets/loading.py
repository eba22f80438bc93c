"""Loading a saved transformers model to be run here: with our attention, frozen, with every weight."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from specforge_capture.targets.attention import IMPLEMENTATION

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@contextmanager
def without_progress_bars() -> Generator[None]:
    """transformers draws no bars meanwhile: a run has progress of its own."""
    shows_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shows_bars:
            transformers_logging.enable_progress_bar()


def load_model(folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """A frozen model on the host whose attention is `specforge_capture.targets.attention`.

    Args:
        folder: of a saved model.
        dtype: element type of its weights.

    Raises:
        ValueError: if the folder holds no loadable model, or lacks weights.
    """
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"target.path: no config.json in {folder}; required: the folder of a saved model")
    try:
        with without_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"target.path: no loadable model in {folder}: {error}") from error
    model, loading = loaded
    # transformers would fill them with random numbers.
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(f"target.path: the weights in {folder} lack {missing[:5]} ({len(missing)} in all)")
    return model.eval().requires_grad_(False)


def random_model(folder: str | Path, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """The same with random weights, the same for the same seed; only `config.json` is read.

    Raises:
        ValueError: if it cannot be.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target.path: no readable config.json in {folder}: {error}") from error
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    return model.eval().requires_grad_(False)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers.

    Raises:
        ValueError: for a model that our attention cannot run.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList) or not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"target.backend hf: {name} has no list of decoder layers, or attention of its own: "
            "set target.backend to sglang"
        )
    if unknown := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        raise ValueError(
            f"target.backend hf: {name} has layers of the types {sorted(unknown)}, which cannot be packed: "
            "set target.backend to sglang"
        )
    return layers
