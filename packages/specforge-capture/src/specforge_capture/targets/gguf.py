"""Targets from a GGUF file: dequantised once into a saved model, which everything else reads as any other.

transformers reads the file, and what it makes of weights, tokenizer and chat template is written as it writes
any model: the frozen embedding and head are then found by key, and engines find a folder that they know.

Invariants:
- The folder's name is a hash of the file, of the element type and of transformers' version. Of the file, its
  size and samples over all of it are read, not each byte: a target of 100 GB must be named in milliseconds.
- The folder appears whole or not at all. One process converts, the others wait for its lock.
- `generation_config.json` names every token that ends an answer, also where the file's own end-of-sequence
  token does not (SmolLM2's tokenizer names `<|im_start|>`).
"""

import hashlib
import importlib.util
import os
import shutil
import struct
from importlib.metadata import version
from pathlib import Path
from typing import Any

from specforge_capture.locks import builder_lock
from specforge_config.run import RunConfig
from specforge_config.target import TargetConfig

CONVERSION_VERSION = 1
"""Raised whenever the same file would give another folder than before."""
STALL_SECONDS = 3600.0
"""A conversion shows no sign of life until it ends; a waiting process gives up after so long."""

_HEAD_BYTES = 1 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


def with_saved_target(config: RunConfig) -> RunConfig:
    """The same run with `target.path` at a saved model; unchanged for a target that is one.

    The revision, unless it is set, names the file: conversions of two quantisations differ in their values
    alone.

    Raises:
        ValueError: if `target.gguf_file` cannot be converted, or the packages that read it are missing.
    """
    target = config.target
    if target.gguf_file is None:
        return config
    folder = convert(target)
    saved = {
        "path": str(folder),
        "gguf_file": None,
        "revision": target.revision or f"gguf-{folder.name[:16]}",
    }
    return config.model_copy(update={"target": target.model_copy(update=saved)})


def convert(target: TargetConfig) -> Path:
    """The folder of the saved model, converted now if it is not there yet. Safe to call from every process.

    Raises:
        ValueError: as `with_saved_target`.
    """
    file = Path(target.path) / str(target.gguf_file)
    cache = Path(target.cache_dir).absolute()
    folder = cache / conversion_key(file, target.dtype)
    if folder.is_dir():
        return folder
    if missing := [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]:
        raise ValueError(
            f"target.gguf_file: {' and '.join(missing)} not installed: pip install 'specforge-capture[gguf]'"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = folder.with_suffix(".lock")
        with builder_lock(lock, "the converted target", "target.cache_dir", STALL_SECONDS):
            if not folder.is_dir():
                _convert_into(folder, file, target.dtype)
    except OSError as error:
        raise ValueError(f"target.cache_dir: cannot write a converted target in {cache}: {error}") from error
    return folder


def conversion_key(file: Path, dtype: str) -> str:
    """32 hex digits over everything that decides a conversion.

    Raises:
        ValueError: if there is no such file, or it is no GGUF file.
    """
    if not file.is_file():
        raise ValueError(f"target.gguf_file: no file {file}")
    size = file.stat().st_size
    known = f"{CONVERSION_VERSION} {dtype} {version('transformers')} {size} "
    digest = hashlib.sha256(known.encode())
    with file.open("rb") as handle:
        head = handle.read(_HEAD_BYTES)
        if not head.startswith(b"GGUF"):
            raise ValueError(f"target.gguf_file: {file} is no GGUF file: it begins with {head[:4]!r}")
        digest.update(head)
        for sample in range(_SAMPLES + 1):
            handle.seek(max(0, size - _SAMPLE_BYTES) * sample // _SAMPLES)
            digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def dequantised() -> dict[str, Any]:
    """Arguments with which transformers dequantises a GGUF file. Its later versions would keep the weights in
    their blocks, where they have a kernel for them, and could not save those."""
    import transformers

    later = getattr(transformers, "GgufConfig", None)
    return {} if later is None else {"quantization_config": later(dequantize=True)}


def _convert_into(folder: Path, file: Path, dtype: str) -> None:
    """Convert `file` into a new `folder`, which appears whole."""
    staged = folder.with_suffix(".new")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        _write(file, staged, dtype)
        staged.rename(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _write(file: Path, folder: Path, dtype: str) -> None:
    """Convert `file` into a new `folder`, on the disk when this returns."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

    from specforge_capture.prompts.chat import ChatRenderer
    from specforge_capture.prompts.special_tokens import resolve_special_tokens
    from specforge_capture.targets.loading import without_progress_bars

    read = {"gguf_file": file.name, "local_files_only": True}
    try:
        with without_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **read)
            assert isinstance(tokenizer, PreTrainedTokenizerBase)
            # A GGUF file does not say; the default corrupts byte-level text.
            tokenizer.clean_up_tokenization_spaces = False
            # float32 is what transformers dequantises to: `auto` rounds nothing.
            wanted = torch.float32 if dtype == "auto" else getattr(torch, dtype)
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=wanted, **read, **dequantised())
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except (ValueError, KeyError, IndexError, NotImplementedError, struct.error) as error:
        raise ValueError(
            f"target.gguf_file: transformers cannot read {file}: {error}; set target.path to the folder of "
            "the original model"
        ) from error
    special = resolve_special_tokens(tokenizer, folder, ChatRenderer(tokenizer))
    model.generation_config.eos_token_id = list(special.stop)
    model.generation_config.pad_token_id = special.pad
    model.generation_config.save_pretrained(folder)
    for path in folder.iterdir():
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
