"""What runs with speculators for `test_speculators_export.py`: `speculators_draft_program.py SITE FOLDER...`.

SITE is where speculators is installed. Each FOLDER holds an exported draft, `draft/`, and `given.pt`: the
arguments of a training step. speculators loads the draft by its own registry, with the target's weights, and
computes the step; `drafted.pt` gets its parameters, and the logits that its loss is handed.

Attention is `eager`, one of its own: FlexAttention has no block masks on a CPU without a compiler.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.append(sys.argv[1])  # behind the environment's own packages, which speculators uses too

from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dspark import core


@torch.no_grad()
def main(folders: list[Path]) -> None:
    seen: dict[str, Any] = {}

    def record(logits: Tensor, targets: Tensor, confidence: Tensor | None, *_: Any, **options: Any) -> Any:
        seen.update(logits=logits, confidence=confidence)
        return logits.new_zeros(()), {}

    core.compute_metrics = record
    for folder in folders:
        config = SpeculatorModelConfig.from_pretrained(folder / "draft")
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(folder / "draft", config=config, dtype=torch.float32)
        model.eval()(**torch.load(folder / "given.pt"))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        torch.save({"class": type(model).__name__, "parameters": state, **seen}, folder / "drafted.pt")


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[2:]])
