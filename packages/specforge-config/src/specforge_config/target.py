"""The frozen target model: where it lies, which backend runs it, and its shape as read from `config.json`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from specforge_config.base import Config, InputPath

ElementType = Literal["float32", "bfloat16", "float16"]
"""What a target may compute in and its states be kept in."""


class TargetConfig(Config):
    """The target model whose hidden states are captured."""

    path: InputPath
    """Folder with `config.json`, safetensors weights and tokenizer, or with `gguf_file`. Pre-tokenised rows
    need no tokenizer, `engine.load_format: dummy` no weights."""
    backend: Literal["hf", "sglang"] = "hf"
    """What runs the target, in the trainer's ranks or in capture servers: `hf` (transformers, CPU and GPU) or
    `sglang`."""
    dtype: Literal["auto", ElementType] = "auto"
    """Element type of the target's weights and of the captured states; `auto` takes the checkpoint's, float32
    for a `gguf_file`."""
    revision: str | None = None
    """Name of the target's revision in the capture contract; default: a hash of its configuration and weight
    index."""
    embedding_key: str | None = None
    """Checkpoint key of the token embedding; default: found by its usual names."""
    head_key: str | None = None
    """Checkpoint key of the vocabulary head; default: found by its usual names, the embedding for tied
    heads."""
    gguf_file: str | None = None
    """GGUF file inside `path` to read the target from: converted once, and read from there ever after."""
    cache_dir: str = ".cache/specforge/targets"
    """Where the conversion of `gguf_file` is kept, relative to the working directory."""

    def element_type(self, shape: TargetShape) -> ElementType:
        """`dtype`; the checkpoint's own for `auto`.

        Raises:
            ValueError: if that is none that a target computes in.
        """
        found = shape.dtype if self.dtype == "auto" else self.dtype
        if found not in get_args(ElementType):
            raise ValueError(
                f"target.dtype: the checkpoint's {found} cannot be captured; "
                f"set it to one of {list(get_args(ElementType))}"
            )
        return cast(ElementType, found)


@dataclass(frozen=True)
class TargetShape:
    """What the rest of the run must know of the target, read from its `config.json` without loading a
    model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    dtype: str
    tied_head: bool
    latent_kv: int | None = None
    """Channels of the latent that a token keeps in place of keys and values, in latent attention (MLA)."""

    def parameters(self) -> int:
        """Number of parameters of a dense decoder of this shape; mixture-of-experts targets have more."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        vocabulary = self.vocab_size * self.hidden_size * (1 if self.tied_head else 2)
        return self.num_layers * layer + vocabulary


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"target.path: no {path.name} in {path.parent}; required: the folder of a saved model"
        )
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"target.path: {path} is not valid JSON: {error}") from None


def read_target_shape(folder: str | Path) -> TargetShape:
    """Read the shape of a target from `config.json` in `folder`, of multimodal models from its `text_config`.

    Raises:
        ValueError: if the file is missing, unreadable or lacks a required field.
    """
    path = Path(folder) / "config.json"
    outer = _read_json(path)
    config = {**outer, **outer["text_config"]} if isinstance(outer.get("text_config"), dict) else outer
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [name for name in required if name not in config]:
        raise ValueError(f"target.path: {path} lacks {', '.join(missing)}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    rope = config.get("rope_parameters") or {}
    return TargetShape(
        hidden_size=hidden,
        intermediate_size=config.get("intermediate_size", 4 * hidden),
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 4096),
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10000.0),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch."),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        latent_kv=config["kv_lora_rank"] + config["qk_rope_head_dim"] if config.get("kv_lora_rank") else None,
    )


def target_revision(folder: str | Path) -> str:
    """16 hex digits over the target's configuration and the names, sizes and index of its weight files.

    Weights themselves are not read: a trillion-parameter target must be named in milliseconds.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if path.name in ("config.json", "model.safetensors.index.json"):
            digest.update(path.read_bytes())
        elif path.suffix in (".safetensors", ".gguf"):
            digest.update(f"{path.name}:{path.stat().st_size}".encode())
    return digest.hexdigest()[:16]
