"""Exported drafts in SGLang 0.5.18's own DSpark model: every weight, and the blocks that it drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_drafts import HEADS, METHOD, ROOT, export_random, frozen_target, load_model, run_program

ENVIRONMENT = ROOT / ".cache" / "sglang-cpu"
DRAFTS = HEADS | {"window": ("draft.sliding_window=9",)}
LENGTHS = (20, 1, 45)
"""Tokens before the anchor, by document."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's parameter -> those of ours that it stacks."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each draft's folder, after SGLang has drafted with it; without SGLang its tests are skipped."""
    if not (ENVIRONMENT / "built-from").is_file():
        raise pytest.skip.Exception("needs SGLang on a CPU: python3.11 scripts/sglang_cpu/install.py")
    place, frozen = tmp_path_factory.mktemp("drafts"), frozen_target()
    generator = torch.Generator().manual_seed(0)
    folders = {}
    for number, (name, overrides) in enumerate(DRAFTS.items()):
        folders[name] = place / str(number)
        export_random(overrides, folders[name] / "draft", "sglang")
        given = {
            "documents": [torch.randn(n, 2 * frozen.head.shape[1], generator=generator) for n in LENGTHS],
            "anchors": torch.tensor([5, 700, 41]),
            "embedding": frozen.embedding,
            "head": frozen.head,
        }
        torch.save(given, folders[name] / "given.pt")
    run_program(ENVIRONMENT / "bin" / "python", "sglang_draft_program.py", *folders.values())
    return folders


def drafted(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "drafted.pt")


@pytest.mark.parametrize("name", DRAFTS)
def test_every_parameter_holds_what_was_exported(folders: dict[str, Path], name: str) -> None:
    expected = load_model(folders[name] / "draft").state_dict()
    for layer in range(2):
        for fused, parts in FUSED.items():
            block = "self_attn" if fused == "qkv_proj" else "mlp"
            names = [f"layers.{layer}.{block}.{part}.weight" for part in parts]
            expected[f"layers.{layer}.{block}.{fused}.weight"] = torch.cat([expected.pop(n) for n in names])
    found = drafted(folders[name])["parameters"]
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", DRAFTS)
def test_it_drafts_what_our_drafter_does(folders: dict[str, Path], name: str) -> None:
    """Both compute in float32 with the weights as written in bfloat16, so that they differ by the order of
    sums alone: far less than bfloat16 rounds (4e-3)."""
    given, theirs = torch.load(folders[name] / "given.pt"), drafted(folders[name])
    drafter = METHOD.drafter(load_model(folders[name] / "draft"), frozen_target())
    for row, hidden in enumerate(given["documents"]):
        drafter.begin()
        ours = drafter.propose(hidden, len(hidden), int(given["anchors"][row]))
        torch.testing.assert_close(theirs["logits"][row], ours.logits, rtol=1e-4, atol=1e-4)
        assert torch.equal(theirs["tokens"][row], ours.tokens)
        torch.testing.assert_close(theirs["confidence"][row], ours.confidence, rtol=1e-4, atol=1e-4)
