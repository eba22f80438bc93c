import torch
from torch import Tensor, nn

from specforge_config.optim import OptimizerConfig
from specforge_train.optim import build_adamw, optimizer_state, squared_norm, update

CONFIG = OptimizerConfig(weight_decay=0.1)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


def reference(
    steps: list[dict[str, Tensor]], start: nn.Module, lr: float, clip: float | None
) -> dict[str, Tensor]:
    """Decoupled AdamW in float64 from normalised gradients (arXiv 1711.05101, algorithm 2)."""
    weights = {name: p.detach().double() for name, p in start.named_parameters()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    beta1, beta2 = CONFIG.betas
    for t, gradients in enumerate(steps, 1):
        norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
        shrink = min(1.0, clip / float(norm)) if clip else 1.0
        for name, w in weights.items():
            g = gradients[name].double() * shrink
            first[name] = beta1 * first[name] + (1 - beta1) * g
            second[name] = beta2 * second[name] + (1 - beta2) * g * g
            moment, scale = first[name] / (1 - beta1**t), second[name] / (1 - beta2**t)
            decay = CONFIG.weight_decay if w.ndim >= 2 else 0.0
            weights[name] = w - lr * decay * w - lr * moment / (scale.sqrt() + CONFIG.eps)
    return weights


def step(
    layer: nn.Module,
    optimizer: torch.optim.AdamW,
    gradients: dict[str, Tensor],
    clip: float | None,
    total: float,
) -> Tensor:
    """One update from gradients that are `total` times the normalised ones."""
    for name, parameter in layer.named_parameters():
        parameter.grad = gradients[name] * total
    return update(optimizer, 1e-2, clip, torch.tensor(total, dtype=torch.float64), squared_norm(layer))


def gradients_of(seed: int, size: float) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": size * torch.randn(3, 5, generator=generator),
        "bias": size * torch.randn(3, generator=generator),
    }


def test_update_normalises_clips_and_decays_matrices_only() -> None:
    layer = model()
    steps = [gradients_of(0, 0.01), gradients_of(1, 5.0), gradients_of(2, 1.0)]
    expected = reference(steps, layer, 1e-2, clip=1.0)
    optimizer = build_adamw(layer, CONFIG)
    for gradients, total in zip(steps, (1.0, 37.5, 4000.0), strict=True):
        norm = step(layer, optimizer, gradients, 1.0, total)
        flat = torch.cat([g.flatten() for g in gradients.values()])
        torch.testing.assert_close(norm, flat.double().norm(), rtol=1e-6, atol=0)
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-7)
        assert parameter.grad is None


def test_without_clip_large_gradients_keep_their_size() -> None:
    layer = model()
    steps = [gradients_of(0, 1.0), gradients_of(1, 50.0)]
    expected = reference(steps, layer, 1e-2, clip=None)
    optimizer = build_adamw(layer, CONFIG)
    for gradients in steps:
        step(layer, optimizer, gradients, None, 8.0)
    torch.testing.assert_close(
        layer.get_parameter("weight").detach().double(), expected["weight"], rtol=1e-5, atol=1e-7
    )


def test_a_step_without_weights_or_with_a_bad_gradient_changes_nothing() -> None:
    layer = model()
    optimizer = build_adamw(layer, CONFIG)
    step(layer, optimizer, gradients_of(0, 1.0), 1.0, 2.0)
    state = optimizer_state(layer, optimizer)
    before = {name: {key: value.clone() for key, value in of.items()} for name, of in state.items()}
    weights = {name: p.detach().clone() for name, p in layer.named_parameters()}
    bad = gradients_of(1, 1.0)
    bad["bias"][1] = float("inf")
    norms = [step(layer, optimizer, gradients_of(2, 0.0), 1.0, 0.0), step(layer, optimizer, bad, 1.0, 2.0)]
    assert not any(bool(norm.isfinite()) for norm in norms)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, weights[name])
        for key, value in state[name].items():
            assert torch.equal(value, before[name][key]), (name, key)
    assert float(state["weight"]["step"]) == 1
