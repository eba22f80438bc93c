"""Rotary position embedding, plain (arXiv 2104.09864) and YaRN (arXiv 2309.00071), in the half-split form.

    angle_i = t · f_i,  f_i = θ^(-2i/D),  (x_i, x_{i+D/2}) turned by angle_i

YaRN divides low frequencies by `factor`, keeps high ones, ramps between the pairs that turn `beta_slow` and
`beta_fast` times within the original context, and scales the tables by an attention factor.

Tables are made anew each step from the positions, in float32 as engines make them: a module without rotary
buffers has none that a load on the meta device could leave unfilled.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from specforge_kernels.draft_layer.api import Rotary

_YARN_REQUIRED = {"factor", "original_max_position_embeddings"}
_YARN_OPTIONAL = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}

Scaling = Mapping[str, float | str] | None


def scaling_type(scaling: Scaling) -> str:
    """`default` or the scaling's own `rope_type` (`type` in older configurations)."""
    return str((scaling or {}).get("rope_type") or (scaling or {}).get("type") or "default")


def check_scaling(scaling: Scaling) -> None:
    """Check `draft.rope_scaling`.

    Raises:
        ValueError: for a type other than `default` and `yarn`, or missing or unknown fields of `yarn`.
    """
    kind = scaling_type(scaling)
    if kind == "default":
        return
    if kind != "yarn":
        raise ValueError(
            f"not implemented yet: draft.rope_scaling of type {kind!r}; there are 'default' and 'yarn'"
        )
    found = set(scaling or ()) - {"rope_type", "type", "rope_theta"}
    missing, unknown = sorted(_YARN_REQUIRED - found), sorted(found - _YARN_REQUIRED - _YARN_OPTIONAL)
    if missing or unknown:
        raise ValueError(
            f"draft.rope_scaling of type 'yarn' lacks {missing}, does not know {unknown}: "
            f"required are {sorted(_YARN_REQUIRED)}, optional {sorted(_YARN_OPTIONAL)}"
        )


class Turns(NamedTuple):
    """How fast each pair turns, and what its tables are multiplied by."""

    frequency: Tensor
    """[D/2] float32, radians a position."""
    factor: float

    def at(self, positions: Tensor) -> Rotary:
        """Tables at `positions` [n] (any integer type) on the frequencies' device."""
        angle = positions.float()[:, None] * self.frequency
        cos, sin = angle.cos(), angle.sin()
        return Rotary(cos, sin) if self.factor == 1.0 else Rotary(cos * self.factor, sin * self.factor)


def turns(head_dim: int, theta: float, scaling: Scaling, device: torch.device | str = "cpu") -> Turns:
    """The frequencies of heads of width `head_dim`."""
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequency = 1.0 / theta ** (pair / head_dim)
    factor = 1.0
    if scaling_type(scaling) == "yarn":
        options = {
            key: float(value)
            for key, value in (scaling or {}).items()
            if key in _YARN_REQUIRED | _YARN_OPTIONAL
        }
        frequency, factor = _yarn(frequency, head_dim, theta, options)
    return Turns(frequency, factor)


def _yarn(frequency: Tensor, head_dim: int, theta: float, options: dict[str, float]) -> tuple[Tensor, float]:
    scale, context = options["factor"], options["original_max_position_embeddings"]

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(strength: float) -> float:
        return 0.1 * strength * math.log(scale) + 1.0 if scale > 1 else 1.0

    low = max(math.floor(pair_that_turns(options.get("beta_fast", 32.0))), 0)
    high = min(math.ceil(pair_that_turns(options.get("beta_slow", 1.0))), head_dim - 1)
    pair = torch.arange(head_dim // 2, dtype=torch.float32, device=frequency.device)
    ramp = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    if {"mscale", "mscale_all_dim"} <= options.keys():
        factor = magnitude(options["mscale"]) / magnitude(options["mscale_all_dim"])
    else:
        factor = magnitude(1.0)
    return frequency * (1 - ramp) + frequency / scale * ramp, factor
