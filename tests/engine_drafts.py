"""Drafts of random weights for the tiny target, exported, and our own model with what was written.

Matrices are drawn wide, norms and biases away from one and zero, so that a tensor in another's place, or one
that was never loaded, changes the logits.
"""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from specforge_config.loading import load_run
from specforge_launch.drafts import Layout, check_folder, shape_of
from specforge_launch.resolve import Resolved, resolve
from specforge_train.export.folder import load_exported
from specforge_train.export.sglang import export_sglang
from specforge_train.export.speculators import export_speculators
from specforge_train.frozen import FrozenTarget, load_frozen
from specforge_train.methods.base import Verifier
from specforge_train.methods.dspark import DSpark
from specforge_train.methods.dspark.model import DSparkModel

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "recipes" / "tiny-target"
METHOD = DSpark()
YARN = "draft.rope_scaling={rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32}"
HEADS = {
    "vanilla": (),
    "gated": ("draft.markov.head=gated", "draft.confidence.with_markov=false"),
    "rnn, yarn": ("draft.markov.head=rnn", YARN),
}


def resolved_run(overrides: Sequence[str]) -> Resolved:
    wide = ("draft.init_std=0.2", "draft.target_layer_ids=[2, 0]")
    return resolve(load_run(ROOT / "recipes" / "quickstart.yaml", [*wide, *overrides]))


def export_random(overrides: Sequence[str], folder: Path, layout: Layout) -> None:
    """Write a draft in bfloat16, and check it against the target."""
    model = METHOD.build(shape_of(resolved_run(overrides)))
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            if value.ndim < 2:
                value.add_(0.2 * torch.randn(value.shape, generator=generator))
    if layout == "sglang":
        export_sglang(model.state_dict(), model.shape, folder)
    else:
        verifier = Verifier(str(TARGET), ("Qwen3ForCausalLM",))
        export_speculators(model.state_dict(), model.shape, folder, verifier)
    check_folder(folder, str(TARGET))


def load_model(folder: Path) -> DSparkModel:
    """Our model with the weights as written, in float32."""
    shape, state = load_exported(folder)
    model = METHOD.build(shape)
    model.load_state_dict(state)
    return model


def frozen_target() -> FrozenTarget:
    return load_frozen(TARGET, dtype=torch.float32, device="cpu")


def run_program(python: Path, name: str, *arguments: Any) -> None:
    """Run a program of this folder; what it prints is shown if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, Path(__file__).parent / name, *map(str, arguments)],
        env=environment,
        timeout=300,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-8000:]
