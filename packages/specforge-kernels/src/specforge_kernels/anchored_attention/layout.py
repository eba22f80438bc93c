"""The layout of a step: its blocks on the host and on the device, and the masks made from them when asked
for.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..transfer import to_device
from .blocks import Blocks
from .flex import build_block_mask
from .sdpa import SlotTile, slot_tiles


@dataclass(frozen=True)
class AnchoredLayout:
    """Which keys each of `M = N·G` query slots sees of `T` context keys; built once a step, for all
    layers.
    """

    blocks: Blocks
    """On the host."""
    backend: str | None
    """The implementation `anchored_attention` uses; None: `policy.choose_attention` decides from its
    tensors.
    """
    origins: Tensor
    """[2, N] int32 on the device: each block's document start and anchor."""
    visible_slots: Tensor
    """[4, tiles] int32 on the device: `Blocks.slots_by_key_tile`."""

    @property
    def tokens(self) -> int:
        """T, context keys."""
        return self.blocks.tokens

    @property
    def slots(self) -> int:
        """M, query slots."""
        return self.blocks.slots

    @cached_property
    def block_mask(self) -> BlockMask:
        """For FlexAttention."""
        return build_block_mask(self.blocks, self.origins.device)

    @cached_property
    def tiles(self) -> tuple[SlotTile, ...]:
        """For `scaled_dot_product_attention`."""
        return slot_tiles(self.blocks, self.origins.device)

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor]:
        """Context and own key intervals, [2, M] int32 each on the device: for the reference."""
        context, own = to_device(
            [self.blocks.intervals.context, self.blocks.intervals.own], self.origins.device
        )
        return context, own


def place_layout(blocks: Blocks, device: torch.device, backend: str | None) -> AnchoredLayout:
    """The layout on `device`, in one asynchronous copy."""
    origins = np.stack([blocks.document, blocks.anchor])
    return AnchoredLayout(blocks, backend, *to_device([origins, blocks.slots_by_key_tile()], device))
