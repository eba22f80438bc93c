import pytest
import torch

from specforge_kernels.policy import choose_attention, choose_layer, choose_objective, forced


def test_a_cpu_gets_the_plain_implementations_with_a_reason() -> None:
    device = torch.device("cpu")
    assert choose_attention(device).name == "sdpa"
    assert choose_objective(device).name == "reference"
    assert "cpu" in choose_attention(device).reason.lower()
    assert "cpu" in choose_objective(device).reason.lower()
    assert choose_layer(device).name == "reference"
    assert "the device is cpu" in choose_layer(device).reason


def test_the_fused_layer_says_what_it_does_not_take() -> None:
    device = torch.device("cuda")
    assert "found torch.float64" in choose_layer(device, torch.float64).reason
    assert "head dimensions 16" in choose_layer(device, head_dim=96).reason
    assert "a row of 32768" in choose_layer(device, hidden=32768).reason


def test_a_forced_implementation_is_chosen_everywhere_until_its_block_ends() -> None:
    device = torch.device("cpu")
    operations = (choose_attention, choose_layer, choose_objective)
    with forced("reference"):
        assert {choose(device).name for choose in operations} == {"reference"}
        with forced("triton"):
            assert {choose(device).name for choose in operations} == {"triton"}
        assert choose_attention(device).name == "reference"
    assert choose_attention(device).name == "sdpa"
    with (
        pytest.raises(ValueError, match="cannot force 'flex': choose one of triton, reference"),
        forced("flex"),
    ):
        pass
