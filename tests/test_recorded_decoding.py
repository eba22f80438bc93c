"""On a GPU the target's decoding steps and the draft's proposals are recorded, and say what a CPU says."""

from pathlib import Path

import pytest
import torch

from specforge_capture.targets.hf import HFTarget
from specforge_config.features import CaptureSpec
from specforge_train.replay import recorded

TARGET = Path(__file__).resolve().parent.parent / "recipes" / "tiny-target"
SPEC = CaptureSpec(
    method="dspark", layer_ids=(0, 2, 3), final_state=True, dtype="float32", hidden_size=128, vocab_size=1024,
    target_revision="tiny", tokenizer_hash="none",
)  # fmt: skip


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_decodes_by_recorded_steps_what_a_cpu_does() -> None:
    plain = HFTarget(TARGET, SPEC, "cpu")
    replayed = HFTarget(TARGET, SPEC, "cuda", record=recorded)
    ids = torch.randint(5, 300, (90,), generator=torch.Generator().manual_seed(0))
    sequences = plain.start(), replayed.start()
    for part in ids.split([40, *[1] * 10, *[8] * 5]):
        want, have = (
            t.extend(part, sequence) for t, sequence in zip((plain, replayed), sequences, strict=True)
        )
        torch.testing.assert_close(have.logits.cpu(), want.logits, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(have.hidden.cpu(), want.hidden, rtol=1e-3, atol=1e-3)
    steps = sequences[1].steps._recorded
    assert set(steps) == {1, 8}
    assert None not in steps.values()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_function_that_waits_for_the_device_is_not_recorded() -> None:
    value = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError):
        recorded(lambda x: (x * x.sum().item(),), (value,))
    replay = recorded(lambda x: (2 * x,), (value,))
    assert replay(3 * value)[0].tolist() == [6.0] * 3
