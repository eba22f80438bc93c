"""A step launches the Triton kernels that the warm-up launches, specialised in the same way: nothing is left
to compile after it.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny_drafts import frozen_target, make_batch, make_shape

from specforge_kernels.policy import forced
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.dspark import DSpark
from specforge_train.parallel import cut, shard

if TYPE_CHECKING:
    from specforge_train.methods.base import DraftModel
    from specforge_train.parallel import World

CPU, BF16 = torch.device("cpu"), torch.bfloat16
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "no confidence": {"confidence": {"enabled": False}},
}
BATCHES = [
    [[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1], [0, 1, 0]],
    [[1] * 17],
    [[1] * 300],
    [[0, 1, 1]],
    [[0, 1]],
]
"""Loss masks of packed documents; the last one holds no anchor."""

Launched = set[tuple[str, str]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    """Each launch's kernel and what Triton compiles it for, on Hopper. Nothing runs."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    compiler, found = make_backend(GPUTarget("cuda", 90, 32)), set()

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = create_function_from_signature(kernel.signature, kernel.params, compiler)
        _, specialization, options = bind(*arguments, **options)
        found.add((kernel.fn.__name__, f"{specialization} {options}"))

    monkeypatch.setattr(JITFunction, "run", record)
    with forced("triton"):
        yield found


@pytest.mark.parametrize("share", [shard, cut])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_warm_up_leaves_nothing_to_compile(
    variant: str, share: "Callable[..., DraftModel]", launched: Launched, world: "World"
) -> None:
    method, shape = DSpark(), make_shape(**VARIANTS[variant])
    target = frozen_target()
    frozen = FrozenTarget(target.embedding.to(BF16), target.head.to(BF16))
    draft = method.build(shape)
    share(draft, world, BF16)
    draft.init_weights(0)
    for launch in draft.launches(CPU, BF16):
        launch()
    warmed = launched.copy()
    assert len({name for name, _ in warmed}) == 11
    launched.clear()
    for masks in BATCHES:
        batch = make_batch(masks)
        assert batch.last_hidden is not None
        inputs = method.prepare(batch, shape, 0).to(CPU)
        draft(inputs, batch.hidden.to(BF16), batch.last_hidden.to(BF16), frozen).loss.backward()
        draft.zero_grad()
    assert launched == warmed
