import torch

from specforge_kernels.policy import choose_attention, choose_objective


def test_a_cpu_gets_the_plain_implementations_with_a_reason() -> None:
    device = torch.device("cpu")
    assert choose_attention(device).name == "sdpa"
    assert choose_objective(device).name == "reference"
    assert "cpu" in choose_attention(device).reason.lower()
    assert "cpu" in choose_objective(device).reason.lower()
