"""The training loop: train -> train_step -> micro_step.

A micro-step takes one batch of captured features and runs forward and backward; an optimizer step sums
gradients and loss weights over micro-steps and ranks, then updates. All ranks do the same in the same order:
whatever one of them must know of another travels in the vector that is summed once an optimizer step (loss
weights, gradient norm, metrics, a stop request).

That vector is read when the step after it is queued, and with it the row of metrics that ends there: the host
stays a step ahead and never waits for the device to run empty, even where each step has its row. So a stop
request, or a gradient that is not finite, shows one step later (the update itself is guarded on the device).
What stands on a row, an evaluation or a checkpoint, waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from specforge_config.features import FeatureBatch, StreamStopped
from specforge_config.run import RunConfig
from specforge_kernels.inductor import keep_compiled
from specforge_train.abort import abort_on_error
from specforge_train.checkpoint import Checkpoints
from specforge_train.decode import DecodeCounts
from specforge_train.frozen import FrozenTarget
from specforge_train.methods.base import DraftModel, DraftShape, Method
from specforge_train.metrics import StepSums, StepTotals
from specforge_train.optim import build_adamw, squared_norm, update
from specforge_train.parallel import (
    World,
    compute_dtype,
    gathered,
    require_equal_replicas,
    set_last_micro_step,
    shard,
)
from specforge_train.recorder import Measured, Recorder, Report, StreamStats
from specforge_train.schedule import lr_factor
from specforge_train.weights import warm_start


class FeatureStream(Protocol):
    """One feature batch a micro-step, of this rank's `training.batch_size` samples."""

    def __next__(self) -> FeatureBatch:
        """The next batch; StopIteration at the end of the plan, StreamStopped before a step that the source
        will not fill on any rank."""
        ...

    def acknowledge(self, step: int) -> None:
        """Optimizer step `step` was taken: nothing needs its features any more. Called on all ranks."""
        ...

    def stats(self) -> StreamStats:
        """What happened since the last call."""
        ...


@dataclass(frozen=True)
class TrainSummary:
    """What a run did over all of its starts. Rates and shares are of steps, not of evaluation and saving; the
    first window of each start, in which kernels are compiled, counts only where there is no other."""

    steps: int
    """Optimizer steps done."""
    start_step: int
    """Those done before this start."""
    samples: int
    """Samples trained on, over the world."""
    samples_per_s: float
    share_capture: float
    share_train: float
    share_bubble: float
    replicas: int
    """Copies of the draft; above one they were compared with each checkpoint and found equal."""
    skipped: int
    """Steps without any supervised slot."""
    dropped: int
    """Samples without any anchor."""
    stopped: bool
    """Whether the run ended before its last step, on request or with its stream."""
    checkpoint: Path | None
    """The newest checkpoint."""
    last: dict[str, Any]
    """The last row of training metrics that this start wrote; empty if there was nothing left to do."""


@dataclass
class _Pending:
    """A step that is queued on the device and not read yet."""

    step: int
    lr: float
    first: tuple[int, int]
    totals: StepTotals
    measured: Measured | None = None
    """Of the window that ends with this step, if a row is due."""


class Trainer:
    """Trains one draft, on this rank of the world. The launcher makes its ten parts, each in its own way."""

    def __init__(
        self,
        config: RunConfig,
        method: Method,
        shape: DraftShape[Any],
        frozen: FrozenTarget,
        stream: FeatureStream,
        world: World,
        checkpoints: Checkpoints,
        total_steps: int,
        evaluate: Callable[[DraftModel], DecodeCounts] | None = None,
        report: Report | None = None,
    ) -> None:
        """Build the sharded draft and its optimizer, and load where the run stands.

        Args:
            config: the run.
            method: the draft's method.
            shape: the draft's sizes.
            frozen: the target's embedding and head, on the device and in the type of computation.
            stream: this rank's features, from step `checkpoints.step` on.
            world: the ranks.
            checkpoints: the run's checkpoints.
            total_steps: optimizer steps of the whole run.
            evaluate: decodes this rank's share of the held-out prompts with a whole draft.
            report: takes progress events; called on rank 0 only.

        Raises:
            ValueError: if `draft.init_from` does not fit.
        """
        self.config, self.method, self.shape, self.frozen = config, method, shape, frozen
        self.stream, self.world, self.checkpoints, self.total_steps = stream, world, checkpoints, total_steps
        self.evaluate = evaluate
        self.dtype = compute_dtype(config.training.dtype, world.device)
        self.model = self._build()
        self.optimizer = build_adamw(self.model, config.optimizer)
        if checkpoints.path:
            checkpoints.load(self.model, self.optimizer)
        self.step = checkpoints.step
        """Optimizer steps done."""
        self.recorder = Recorder(config, world, checkpoints, report)
        self._stop_file = checkpoints.folder / "stop"
        self._stopping = False
        self._pending: _Pending | None = None

    def train(self) -> TrainSummary:
        """Train to the last step, or until `<run folder>/stop` exists or the stream is stopped: then save and
        stop.

        Raises:
            FloatingPointError: if a gradient is not finite, naming the step.
            ValueError: if the stream ends early or breaks its contract, or a checkpoint cannot be written.
            In a world of several ranks an error ends the process instead; see `specforge_train.abort`.
        """
        with abort_on_error(self.checkpoints.folder, self.world.rank, self.world.size, lambda: self.step):
            self.recorder.clock.restart()
            try:
                while self.step < self.total_steps and not self._stopping:
                    self.train_step()
                    self.log_evaluate_save()
            except StreamStopped as end:
                if self.world.main:
                    print(f"stopping after step {self.step} of {self.total_steps}: {end}", flush=True)
            except BaseException:
                if self.world.size == 1:  # a row is a collective, in which a rank that failed would wait
                    self._settle()
                raise
            self.log()
            if self.checkpoints.newest_step < self.step:
                self.save()
            self.recorder.close()
            if self._stopping and self.step < self.total_steps and self.world.main:
                self._stop_file.unlink(missing_ok=True)  # after the last step it still stops the evaluation
        return self._summary()

    def train_step(self) -> None:
        """One optimizer step: accumulate, sum over the world, update. Then the step before it is read."""
        step, accumulation = self.step + 1, self.config.batches.accumulation
        clock, sums, consumed = self.recorder.clock, StepSums(self.world), []
        for micro in range(accumulation):
            with clock.span("capture"):
                batch = self.next_batch()
            consumed += zip(batch.positions, batch.sample_ids, strict=True)
            with clock.span("train"):
                set_last_micro_step(self.model, micro + 1 == accumulation, self.world.sharding)
                self.micro_step(batch, sums)
            del batch  # its states are freed before the next capture allocates
        with clock.span("train"):
            sums.add({}, stop=float(self.world.main and self._stop_file.exists()))
            totals = sums.reduce(squared_norm(self.model) / self.world.replicas)
            lr = self.config.optimizer.lr * lr_factor(self.config.schedule, step, self.total_steps)
            update(self.optimizer, lr, self.config.optimizer.clip, totals.weights, totals.squared)
        self.stream.acknowledge(step)
        self.recorder.add_samples(step, consumed)
        self._settle()
        self._pending = _Pending(step, lr, consumed[0][0], totals)
        self.step = step

    def micro_step(self, batch: FeatureBatch, sums: StepSums) -> None:
        """Forward and backward of one batch; its numerators and denominators are added to the step's."""
        inputs = self.method.prepare(batch, self.shape, self.config.seed, self.config.training.unsupervised)
        terms = self.model(inputs.to(self.world.device), batch.hidden, batch.last_hidden, self.frozen)
        terms.loss.backward()
        sums.add(
            terms.sums,
            weights=inputs.weight_sum,
            samples=len(batch.sample_ids),
            tokens=batch.tokens.shape[0],
            dropped=inputs.dropped,
            flops=self.method.flops(self.shape, inputs),
        )

    def next_batch(self) -> FeatureBatch:
        """The next batch of the stream.

        Raises:
            ValueError: if the stream is at its end, or gives another number of samples or another contract.
        """
        where = f"rank {self.world.rank}, step {self.step + 1} of {self.total_steps}"
        batch = next(self.stream, None)
        if batch is None:
            raise ValueError(
                f"{where}: the stream of features has ended; each rank needs one batch a micro-step"
            )
        wanted = self.config.batches.batch_size
        if len(batch.sample_ids) != wanted:
            raise ValueError(
                f"{where}: received the samples {list(batch.sample_ids)}, required {wanted} of them"
            )
        if batch.spec is not self.checkpoints.spec:
            self.checkpoints.spec.require_equal(batch.spec, here="this run", there=f"the features of {where}")
        return batch

    def log_evaluate_save(self) -> None:
        """What is due after this step. A row comes before what stands on it, the checkpoint last; alone it is
        written when the next step is queued."""
        training, interval = self.config.training, self.config.evaluation.interval
        evaluate = bool(self.evaluate and interval and self.step % interval == 0)
        save = bool(training.save_every and self.step % training.save_every == 0)
        if save or evaluate:
            self.log()
        elif self.step % training.log_every == 0:
            self._end_window()
        if evaluate:
            self.evaluate_draft()
        if save:
            self.save()
        if save or evaluate:
            self.recorder.clock.restart()

    def log(self) -> None:
        """Wait for the last step and write a row over the steps since the last one."""
        self._end_window()
        self._settle()

    def evaluate_draft(self) -> None:
        """Decode the held-out prompts, each rank its share, and write a row over all of them."""
        assert self.evaluate is not None
        counts = self.evaluate(self.draft()).to_vector().to(self.world.device)
        self.recorder.add_evaluation(self.step, DecodeCounts.from_vector(self.world.sum_(counts).cpu()))

    def draft(self) -> DraftModel:
        """A whole copy of the draft on every rank's device, in the type of computation, without gradients.

        A collective: call it on all ranks.
        """
        with self.world.device:
            draft = self.method.build(self.shape).to(self.dtype).eval().requires_grad_(False)
        state = draft.state_dict()
        for name, value in gathered(self.model):  # one tensor at a time is whole in float32
            state[name].copy_(value)
        return draft

    def save(self) -> None:
        """Write a checkpoint of this step; the rows that belong to it are on the disk before.

        Raises:
            RuntimeError: if replicas of the draft differ, of which the checkpoint would keep the first.
        """
        require_equal_replicas(self.model, self.world)
        self.recorder.sync()
        path = self.checkpoints.save(self.step, self.model, self.optimizer, self.recorder.spent)
        self.recorder.tell("checkpoint", self.step, path=str(path))

    def _build(self) -> DraftModel:
        """The sharded draft with the weights of a fresh start; no rank ever holds more than its shard."""
        keep_compiled()
        with torch.device("meta"):
            model = self.method.build(self.shape)
        shard(model, self.world, self.dtype).to_empty(device=self.world.device)
        model.warm_up(self.world.device, self.dtype)
        if self.checkpoints.path is None:
            model.init_weights(self.config.seed)
            if self.config.draft.init_from:
                warm_start(model, Path(self.config.draft.init_from))
        return model

    def _end_window(self) -> None:
        """Let a row end with the pending step, if there is one; `_settle` writes it."""
        if self._pending and self._pending.measured is None:
            self._pending.measured = self.recorder.measure(self.stream.stats())

    def _settle(self) -> None:
        """Read the sums of the pending step, if there is one, and write the row that ends with it."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        head, metrics = pending.totals.read()
        if not math.isfinite(head["norm"]):
            raise FloatingPointError(
                f"the gradient norm of step {pending.step} is {head['norm']}; its update was not applied, "
                f"the last checkpoint is {self.checkpoints.newest}: look at the captured states, lower "
                "optimizer.lr or raise schedule.warmup_steps"
            )
        self._stopping = self._stopping or head["stop"] > 0
        epoch, first = pending.first
        facts = {
            "step": pending.step,
            "epoch": epoch,
            "first": first,
            "count": self.config.batches.global_batch_size,
            "lr": pending.lr,
            "grad_norm": head["norm"],
        }
        self.recorder.add_step(facts, head, metrics, self.total_steps)
        if pending.measured:
            self.recorder.close_window(pending.measured)

    def _summary(self) -> TrainSummary:
        spent = self.recorder.spent
        wall = spent["wall"] or 1.0
        capture, train = spent["capture"] / wall, spent["train"] / wall
        return TrainSummary(
            steps=self.step,
            start_step=self.checkpoints.step,
            samples=int(spent["samples"]),
            samples_per_s=spent["timed"] / wall * self.world.size,
            share_capture=capture,
            share_train=train,
            share_bubble=max(0.0, 1.0 - capture - train) if spent["wall"] else 0.0,
            replicas=self.world.replicas,
            skipped=int(spent["skipped"]),
            dropped=int(spent["dropped"]),
            stopped=self.step < self.total_steps,
            checkpoint=self.checkpoints.newest,
            last=self.recorder.last,
        )
