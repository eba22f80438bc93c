"""Mixed precision for ranks that each hold the whole draft, alone or as replicas.

FSDP would pack and copy each gradient through float32 buffers as if shards lay elsewhere. Here the float32
master weights have a copy in the type of computation, which forwards use. As gradients of the copy appear
they are added up in float32, a unit of parameters in one buffer. In the last micro-step of an optimizer step
a unit's buffer is summed over the replicas while the backward goes on.

Invariant: outside of a forward the model's parameters are its masters, and after the last micro-step their
`grad` is the sum over micro-steps and replicas; a parameter that got none has zeros.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable


@dataclass
class _Place:
    """Where a parameter is registered, and its copy; itself where its type is that of the computation."""

    module: nn.Module
    name: str
    master: nn.Parameter
    copy: nn.Parameter


@dataclass
class _Unit:
    """Parameters whose gradients travel together."""

    places: list[_Place]
    """Of parameters that are trained."""
    buffer: Tensor | None = None
    """The gradients of an optimizer step, behind each other; None before the first one."""
    gradients: list[Tensor] = field(default_factory=list)
    """Views of it."""
    written: set[int] = field(default_factory=set)
    """Which of them hold something."""
    missing: int = 0
    """Gradients that have not come in this backward."""

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of a parameter."""
        self._allocate()
        own = self.gradients[index]
        own.add_(gradient) if index in self.written else own.copy_(gradient)
        self.written.add(index)

    def complete(self) -> None:
        """Write zeros where no gradient came."""
        self._allocate()
        for index, gradient in enumerate(self.gradients):
            if index not in self.written:
                gradient.zero_()
        self.missing = 0

    def hand_over(self) -> None:
        """Give the masters their gradients."""
        for place, gradient in zip(self.places, self.gradients, strict=True):
            assert place.master.grad is None, "the gradients of the step before are still there"
            place.master.grad = gradient
        self.buffer, self.gradients, self.written = None, [], set()

    def _allocate(self) -> None:
        if self.buffer is None:
            masters = [place.master for place in self.places]
            sizes = [master.numel() for master in masters]
            self.buffer = torch.empty(sum(sizes), dtype=torch.float32, device=masters[0].device)
            parts = zip(self.buffer.split(sizes), masters, strict=True)
            self.gradients = [part.view(master.shape) for part, master in parts]


class WholeCopies:
    """Makes a model compute in `dtype` over float32 masters, and sums its gradients over replicas.

    A micro-step is one backward. The update drops the gradients and marks the masters as changed
    (`specforge_train.optim.update`).

    Args:
        model: with float32 parameters, each of one module; on the meta device they may be made and filled
            before its first forward.
        layers: its parts whose gradients travel together, in the order of the forward; all else is a unit.
        dtype: of the computation.
        replicas: the ranks that hold a copy; None for a rank alone.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Iterable[nn.Module],
        dtype: torch.dtype,
        replicas: dist.ProcessGroup | None,
    ) -> None:
        self.last = True
        """Whether the next backward is the last of its optimizer step."""
        self._model, self._layers, self._dtype, self._replicas = model, list(layers), dtype, replicas
        self._places: list[_Place] = []
        self._units: list[_Unit] = []
        self._copied: list[int] = []  # the versions of the masters that the copies are of
        self._in_backward = False
        self._sums: list[Any] = []
        model.register_forward_pre_hook(self._enter, prepend=True)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, *_: object) -> None:
        assert not self._in_backward, "a backward failed: its gradients are incomplete"
        if not self._places:
            self._build()
        versions = [place.master._version for place in self._places]
        if self._dtype != torch.float32 and versions != self._copied:
            with torch.no_grad():
                torch._foreach_copy_([p.copy for p in self._places], [p.master for p in self._places])
            self._copied = versions
        for place in self._places:
            place.module._parameters[place.name] = place.copy

    def _leave(self, *_: object) -> None:
        for place in self._places:
            place.module._parameters[place.name] = place.master

    def _build(self) -> None:
        """Find the masters. Units are in the order in which a backward completes them: the last layer's first
        and what is around the layers last.
        """
        done: set[nn.Module] = set()
        for part in (*reversed(self._layers), self._model):
            modules = [module for module in part.modules() if module not in done]
            done.update(modules)
            places = [
                _Place(module, name, master, self._copy(master))
                for module in modules
                for name, master in module._parameters.items()
                if master is not None
            ]
            self._places += places
            unit = _Unit([place for place in places if place.master.requires_grad])
            for index, place in enumerate(unit.places):
                place.copy.register_post_accumulate_grad_hook(self._hook(len(self._units), index))
            if unit.places:
                self._units.append(unit)
        assert len({id(place.master) for place in self._places}) == len(self._places), "a parameter is shared"

    def _copy(self, master: nn.Parameter) -> nn.Parameter:
        if self._dtype == torch.float32:
            return master
        with torch.inference_mode(False):  # the first forward may be an evaluation's
            return nn.Parameter(torch.empty_like(master, dtype=self._dtype), master.requires_grad)

    def _hook(self, unit: int, index: int) -> Callable[[Tensor], None]:
        """What takes a gradient. It must not hold the copy, not even by way of `self`: the garbage collector
        does not see a tensor's hooks, and the model would stay.
        """
        owner = weakref.ref(self)

        def take(copy: Tensor) -> None:
            if (copies := owner()) is not None:
                copies._take(copies._units[unit], index, copy)

        return take

    def _take(self, unit: _Unit, index: int, copy: Tensor) -> None:
        if not self._in_backward:
            self._begin()
        gradient, copy.grad = copy.grad, None
        assert gradient is not None
        unit.add(index, gradient)
        unit.missing -= 1
        if self.last and unit.missing == 0:
            self._sum_ready()

    def _begin(self) -> None:
        self._in_backward = True
        Variable._execution_engine.queue_callback(self._end)
        for unit in self._units:
            unit.missing = len(unit.places)

    def _sum_ready(self) -> None:
        """Start the sums of units that are complete, on all ranks in the same order."""
        if self._replicas is None:
            return
        while len(self._sums) < len(self._units) and self._units[len(self._sums)].missing == 0:
            buffer = self._units[len(self._sums)].buffer
            assert buffer is not None
            self._sums.append(dist.all_reduce(buffer, group=self._replicas, async_op=True))

    def _end(self) -> None:
        """A backward is over."""
        self._in_backward = False
        if not self.last:
            return
        for unit in self._units:
            unit.complete()
        self._sum_ready()
        for work in self._sums:
            work.wait()
        self._sums.clear()
        for unit in self._units:
            unit.hand_over()
