"""AdamW on the sharded float32 master weights, with normalisation, clipping and skipping inside the fused
update.

After the backward a gradient is g = Σ over world and micro-steps of ∂(un-normalised loss). With W the world's
sum of loss weights,

    norm   = |g| / W
    update = AdamW(g · min(1, clip / norm) / W)

The factor goes into the fused kernel (its `grad_scale` divides each gradient as it is read), so no pass over
the gradients is spent on it. Where `norm` is not finite, W = 0 included, the kernel leaves weights and
moments as they are (`found_inf`). Nothing here waits for the device.

Source: decoupled weight decay, arXiv 1711.05101.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from specforge_config.optim import OptimizerConfig
from specforge_train.parallel import local


def build_adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the model's parameters, its moments at zero; matrices decay, norms and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    # Made now rather than in the first step, so that a checkpoint can be loaded into it.
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Parameter name -> its AdamW state; the tensors are the live ones, so that loading in place restores the
    optimizer.
    """
    return {name: optimizer.state[p] for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()  # with gradients on, each `to_local` would be a node of a graph
def squared_norm(model: nn.Module) -> Tensor:
    """[] float64, on the device: Σ g² over this rank's shards. Summed over the ranks of `shard`, each element
    counts once.
    """
    gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
    gradients = [g for g in gradients if g.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum()


def update(
    optimizer: torch.optim.AdamW, lr: float, clip: float | None, weights: Tensor, squared: Tensor
) -> Tensor:
    """One optimizer step from summed gradients, which are freed.

    Args:
        optimizer: from `build_adamw`.
        lr: learning rate of this step.
        clip: largest norm of the normalised gradient; None never scales.
        weights: [] W, the world's sum of loss weights.
        squared: [] |g|² of the whole gradient.

    Returns:
        [] the norm before clipping; where it is not finite, nothing was updated.
    """
    norm = squared.sqrt() / weights
    shrink = (clip / (norm + 1e-6)).clamp(max=1.0) if clip is not None else torch.ones_like(norm)
    optimizer.grad_scale = (weights / shrink).float()  # ty: ignore[missing-attribute]
    optimizer.found_inf = norm.isfinite().logical_not().float()  # ty: ignore[missing-attribute]
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    # A fused step does not say that it changed them, and whoever holds a copy has to know.
    increment_version([parameter for group in optimizer.param_groups for parameter in group["params"]])
    optimizer.zero_grad(set_to_none=True)
    return norm
