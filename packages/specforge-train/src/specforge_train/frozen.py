"""The two target tensors that a draft borrows: the token embedding and the vocabulary head.

They are read by key from the target's safetensors, without loading the target. Checkpoints hide them: a tied
head is not stored at all, composite models nest their language model under a prefix, shards may come without
an index. With an engine's dummy weights they are random too, at the target's shapes.

Notation: V rows of the vocabulary, padding included; H hidden.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specforge_config.target import TargetShape

_EMBEDDING_ENDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEAD_ENDINGS = ("lm_head.weight", "embed_out.weight")
_INITIAL_STD = 0.02


@dataclass(frozen=True)
class FrozenTarget:
    """The target's embedding and head, on the device and in the type of the draft's computation."""

    embedding: Tensor
    """[V, H]."""
    head: Tensor
    """[V, H]; the embedding's own storage if the target ties the two."""
    dummy: bool = False
    """Whether the values are random, as an engine's with `load_format: dummy`."""


def load_frozen(
    folder: str | Path,
    *,
    embedding_key: str | None = None,
    head_key: str | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
) -> FrozenTarget:
    """Read embedding and head of the target in `folder`.

    Args:
        folder: `config.json` and safetensors: one file, shards with `model.safetensors.index.json`, or shards
            without.
        embedding_key: checkpoint key of the embedding; default: the only key with a usual ending outside
            numbered layers.
        head_key: the same of the head; default also the embedding, for a target that ties the two.
        dtype: element type to convert to.
        device: where to put them.

    Raises:
        ValueError: listing the keys found, if a key is missing or ambiguous; if shapes disagree with each
            other or with `config.json`; or if there are no safetensors.
    """
    path = Path(folder)
    config = _read_config(path)
    files = _files_by_key(path)
    embedding_key = embedding_key or _find(files, _EMBEDDING_ENDINGS, "embedding", "target.embedding_key")
    tied = config.get("tie_word_embeddings")
    if head_key is None and (tied or (tied is None and not _matches(files, _HEAD_ENDINGS))):
        head_key = embedding_key
    head_key = head_key or _find(files, _HEAD_ENDINGS, "vocabulary head", "target.head_key")
    embedding = _read(files, embedding_key, "target.embedding_key", dtype, device)
    head = embedding
    if head_key != embedding_key:
        head = _read(files, head_key, "target.head_key", dtype, device)
    rows = config.get("vocab_size", embedding.shape[0])
    if embedding.ndim != 2 or head.shape != embedding.shape or embedding.shape[0] != rows:
        raise ValueError(
            f"{embedding_key} is {list(embedding.shape)} and {head_key} is {list(head.shape)}, required are "
            f"equal shapes [V, H] with V = {rows}, the vocab_size of {path / 'config.json'}: "
            "set target.embedding_key and target.head_key"
        )
    return FrozenTarget(embedding, head)


def random_frozen(
    target: TargetShape, *, seed: int, dtype: torch.dtype, device: torch.device | str
) -> FrozenTarget:
    """Embedding and head of a target with dummy weights: normal values of the usual initial width, made on
    the device, the same on every rank of one kind of device.

    Args:
        target: the target's shape; a tied head is the embedding.
        seed: of the values.
        dtype: element type.
        device: where to make them.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw() -> Tensor:
        rows = torch.empty(target.vocab_size, target.hidden_size, dtype=dtype, device=device)
        return rows.normal_(std=_INITIAL_STD, generator=generator)

    embedding = draw()
    return FrozenTarget(embedding, embedding if target.tied_head else draw(), dummy=True)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"target.path: no config.json in {folder}; required: the folder of a saved model")
    config = json.loads(path.read_text())
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _files_by_key(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {key: folder / name for key, name in json.loads(index.read_text())["weight_map"].items()}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            files |= dict.fromkeys(shard.keys(), path)
    if not files:
        found = sorted(path.name for path in folder.iterdir())
        raise ValueError(
            f"target.path: no safetensors in {folder}, found {found}: save the target with save_pretrained"
        )
    return files


def _matches(keys: Iterable[str], endings: tuple[str, ...]) -> list[str]:
    """Keys with one of the endings outside numbered layers, in which multi-token prediction has its own."""
    return [
        key
        for key in keys
        if any(key == ending or key.endswith("." + ending) for ending in endings)
        and not any(part.isdigit() for part in key.split("."))
    ]


def _find(files: Mapping[str, Path], endings: tuple[str, ...], what: str, setting: str) -> str:
    found = _matches(files, endings)
    if len(found) == 1:
        return found[0]
    problem = (
        f"several keys look like the target's {what}: {found}"
        if found
        else f"no key looks like the target's {what}"
    )
    raise ValueError(f"{problem}; set {setting}. {_listing(files)}")


def _read(
    files: Mapping[str, Path], key: str, setting: str, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    if key not in files:
        raise ValueError(f"{setting} is {key!r}, which the checkpoint does not hold. {_listing(files)}")
    if not files[key].is_file():
        raise ValueError(f"the checkpoint's index places {key} in {files[key]}, which does not exist")
    with safe_open(files[key], framework="pt") as shard:
        if key not in shard.keys():  # noqa: SIM118 (the handle is no mapping)
            raise ValueError(f"the checkpoint's index places {key} in {files[key]}, which does not hold it")
        return shard.get_tensor(key).to(device=device, dtype=dtype)


def _listing(keys: Iterable[str]) -> str:
    outside = sorted(key for key in keys if not any(part.isdigit() for part in key.split(".")))
    total = len(list(keys))
    return (
        f"Keys found outside numbered layers ({len(outside)} of {total}): {', '.join(outside[:40]) or 'none'}"
    )
