"""Finding a trained draft again: by its recipe, by its run's folder, or by its exported folder."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from specforge_capture.prompts.chat import ChatRenderer, has_tokenizer, load_tokenizer
from specforge_capture.prompts.special_tokens import resolve_mask_token, resolve_special_tokens
from specforge_capture.targets.gguf import with_saved_target
from specforge_config.loading import load_run
from specforge_config.run import RunConfig
from specforge_config.target import TargetShape, read_target_shape
from specforge_launch import recipe as recipes
from specforge_launch.resolve import Resolved, resolve
from specforge_launch.run_folder import RunFolder
from specforge_train.export.folder import check_export, load_exported
from specforge_train.export.sglang import export_sglang
from specforge_train.export.speculators import export_speculators
from specforge_train.frozen import FrozenTarget, load_frozen, random_frozen
from specforge_train.methods.base import DraftShape, Verifier
from specforge_train.registry import get_method
from specforge_train.weights import read_weights

Layout = Literal["sglang", "speculators"]
"""Whose layout a draft is exported in."""


@dataclass(frozen=True)
class FoundDraft:
    """A draft on the host."""

    name: str
    config: RunConfig
    shape: DraftShape[Any]
    state: dict[str, Tensor]


def find_run(source: str, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run, named by its folder or its recipe.

    Raises:
        ValueError: if it is neither.
    """
    resolved = RunFolder(source).resolved
    return with_saved_target(load_run(resolved if resolved.is_file() else recipes.find(source), overrides))


def find_draft(
    source: str,
    overrides: Sequence[str],
    *,
    checkpoint: str | None,
    target: str | None,
    prompts: Sequence[str],
) -> FoundDraft:
    """The draft that `source` names, with the run that measures it.

    Args:
        source: a recipe, a run's folder or an exported draft.
        overrides: `section.key=value` each.
        checkpoint: name of one of the run's checkpoints; the newest whole one by default.
        target: the target's folder, for an exported draft outside of a run's folder.
        prompts: evaluation prompts in place of the run's.

    Raises:
        ValueError: if there is no such draft, or nothing to measure it with.
    """
    folder = Path(source)
    exported = (folder / "config.json").is_file()
    if exported:
        config = with_saved_target(_config_of_export(folder, overrides, target, prompts))
        shape, state = load_exported(folder)
        layers = {"target_layer_ids": shape.layer_ids, "mask_token_id": shape.mask_token_id}
        config = config.model_copy(update={"draft": shape.config.model_copy(update=layers)})
        name = source
    else:
        config = find_run(source, overrides)
        path = checkpoint_path(config, checkpoint)
        shape, state, name = shape_of(resolve(config)), read_weights(path), str(path)
    if prompts:
        config = config.model_copy(
            update={"evaluation": config.evaluation.model_copy(update={"prompts": tuple(prompts)})}
        )
    if not config.evaluation.prompts:
        raise ValueError("nothing to decode: set evaluation.prompts in the recipe, or pass --prompts")
    return FoundDraft(name, config, shape, state)


def frozen_of(resolved: Resolved, dtype: torch.dtype, device: torch.device) -> FrozenTarget:
    """The target's embedding and head: its own, or random ones beside an engine's dummy weights."""
    config = resolved.config
    if config.dummy_weights:
        return random_frozen(resolved.target, seed=config.seed, dtype=dtype, device=device)
    keys = {"embedding_key": config.target.embedding_key, "head_key": config.target.head_key}
    return load_frozen(config.target.path, **keys, dtype=dtype, device=device)


def export_checkpoint(
    config: RunConfig,
    checkpoint: str | None,
    folder: Path,
    layout: Layout = "sglang",
    verifier: str | None = None,
) -> None:
    """Write a run's checkpoint to `folder`, and check it.

    Args:
        config: the run.
        checkpoint: name of one of its checkpoints; the newest whole one by default.
        folder: where to write.
        layout: which engine's.
        verifier: what a speculators export calls the target; its folder by default.

    Raises:
        ValueError: if there is no such checkpoint, if it is not the draft that the configuration describes,
            if it was trained with dummy weights, or if speculators would compute it differently.
    """
    if config.dummy_weights:
        raise ValueError(
            "engine.load_format is dummy: this draft has learnt from a random target, which no server runs; "
            "required for an export: a run with the target's own weights"
        )
    path = checkpoint_path(config, checkpoint)
    resolved = resolve(config)
    state, shape = read_weights(path), shape_of(resolved)
    if layout == "sglang":
        export_sglang(state, shape, folder)
    else:
        export_speculators(state, shape, folder, _verifier_of(config, verifier))
    check_exported(resolved, folder)


def check_exported(resolved: Resolved, folder: Path) -> None:
    """Check that an export is complete, fits the run's target, and names the layers and the mask token of the
    run's capture.

    Raises:
        ValueError: naming what differs.
    """
    served = check_export(folder)
    _require_target(folder, served, resolved.target)
    wanted = {"target_layer_ids": resolved.spec.layer_ids, "mask_token_id": resolved.mask_token_id}
    found = {"target_layer_ids": served.layer_ids, "mask_token_id": served.mask_token_id}
    if found != wanted:
        raise ValueError(
            f"{folder} was exported for {found}, but the run captures with {wanted}: export it again"
        )


def check_folder(folder: Path, target: str | None) -> None:
    """Check that an exported draft is complete. Where it lies in a run's folder it is checked against the
    run, else against `target` with its tokenizer, if that is given.

    Raises:
        ValueError: naming what is wrong, or where target or tokenizer do not fit.
    """
    beside = RunFolder(folder.absolute().parent).resolved
    if beside.is_file():
        overrides = [f"target.path={json.dumps(target)}"] if target else []
        check_exported(resolve(with_saved_target(load_run(beside, overrides))), folder)
        return
    served = check_export(folder)
    if target is None:
        return
    shape = read_target_shape(target)
    _require_target(folder, served, shape)
    if has_tokenizer(target):
        tokenizer = load_tokenizer(target)
        # Added tokens may lie beyond the rows, as a padding token that is never embedded does.
        if tokenizer.vocab_size > served.vocab_size:
            raise ValueError(
                f"the tokenizer of {target} has {tokenizer.vocab_size} tokens, required at most "
                f"{served.vocab_size}, the vocabulary of {folder}: pass --target the draft's own target"
            )
        special = resolve_special_tokens(tokenizer, target, ChatRenderer(tokenizer))
        resolve_mask_token(tokenizer, shape.vocab_size, served.mask_token_id, special)


def _require_target(folder: Path, served: DraftShape[Any], target: TargetShape) -> None:
    names = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_layers"}
    faults = [
        f"{name} is {getattr(served, name)}, required {getattr(target, of_target)}"
        for name, of_target in names.items()
        if getattr(served, name) != getattr(target, of_target)
    ]
    if faults:
        raise ValueError(f"{folder} is a draft for another target:\n  " + "\n  ".join(faults))


def _verifier_of(config: RunConfig, name: str | None) -> Verifier:
    described = json.loads((Path(config.target.path) / "config.json").read_text())
    return Verifier(name or config.target.path, tuple(described.get("architectures") or ()))


def shape_of(resolved: Resolved) -> DraftShape[Any]:
    """The sizes of a run's draft."""
    draft = resolved.config.draft
    return get_method(draft.method).resolve(draft, resolved.target, resolved.mask_token_id)


def checkpoint_path(config: RunConfig, name: str | None) -> Path:
    """A checkpoint of a run, or the run's folder, which stands for its newest whole one.

    Raises:
        ValueError: listing the checkpoints there are.
    """
    folder = RunFolder(config.folder)
    if name is None:
        return folder.path
    path = folder.checkpoints / name
    if not path.is_dir():
        there = ", ".join(sorted(p.name for p in folder.checkpoints.glob("step-*"))) or "none"
        raise ValueError(f"no checkpoint {name} in {folder.checkpoints}; there: {there}")
    return path


def _config_of_export(
    folder: Path, overrides: Sequence[str], target: str | None, prompts: Sequence[str]
) -> RunConfig:
    beside = RunFolder(folder.parent).resolved
    if beside.is_file():
        return load_run(beside, [*overrides, *([f"target.path={target}"] if target else [])])
    if target is None:
        raise ValueError(
            f"{folder} lies in no run's folder: name its target with --target and prompts with --prompts"
        )
    named = [f"target.path={json.dumps(target)}", f"data.train={json.dumps(list(prompts))}"]
    return load_run(None, [*named, *overrides])
