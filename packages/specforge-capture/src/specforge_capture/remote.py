"""RemoteStream: features for one trainer rank from capture servers, fetched ahead of the trainer.

One thread a rank takes windows of refs from rank 0, fetches their objects and makes batches, as many ahead as
the settings allow. On a GPU it works on a stream of its own, so that copies run beside training.

Invariant: order, batches and rank assignment are those of `PromptPlan`, as in a colocated run; tokens and
masks come from the prompt cache, and a ref that does not fit them, or objects that do not fit the ref, never
reach the trainer. Such a sample is captured anew through the ledger.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from specforge_capture.dispatch import recapture_box, report_box, window_box
from specforge_capture.fetch import Fetcher
from specforge_capture.mail import Mailbox, StreamFailed
from specforge_capture.prompts.cache import PromptSet
from specforge_capture.prompts.plan import PromptPlan
from specforge_capture.refs import FeatureRef
from specforge_capture.stores.base import CorruptObject, FeatureStore, MissingObject, ShortObject, StoreError
from specforge_capture.stream import StreamStats
from specforge_capture.targets.base import PromptRow, feature_batch
from specforge_config.features import CaptureSpec, FeatureBatch, StreamStopped, spec_hash
from specforge_config.producer import ConsumerConfig

_POLL_SECONDS = 0.02
_STORE_TRIES = 3
_STORE_RETRY_SECONDS = 1.0
_PEER_SECONDS = 30.0
"""What fails at rank 0 after `wait_seconds` has so long to arrive here, with its reason."""


class _Closed(Exception):
    """The stream was closed while its thread worked."""


class RemoteStream:
    """Iterates over the feature batches of one rank, one a micro-step, in the plan's order.

    Args:
        store: where features are fetched; the caller closes it, after the stream.
        prompts: the prompt set, as the producer has it.
        plan: the order of prompts.
        spec: the capture contract.
        config: how far ahead to fetch, and how long to wait.
        mail: as rank 0's `Dispatcher` has it.
        device: where states go.
        rank: this rank of the world.
        start_step: optimizer step to start at.
        total_steps: optimizer steps of the run.

    Raises:
        ValueError: if the plan is not over `prompts`.
    """

    def __init__(
        self,
        store: FeatureStore,
        prompts: PromptSet,
        plan: PromptPlan,
        spec: CaptureSpec,
        config: ConsumerConfig,
        mail: dist.Store,
        device: torch.device,
        *,
        rank: int = 0,
        start_step: int = 0,
        total_steps: int,
    ) -> None:
        if (plan.num_rows, plan.fingerprint) != (len(prompts), prompts.fingerprint):
            raise ValueError(f"the plan is over {plan.num_rows} other prompts than the {len(prompts)} given")
        self._prompts, self._plan, self._spec, self._config = prompts, plan, spec, config
        self._device, self._rank, self._steps = device, rank, range(start_step, total_steps)
        self._windows, self._recaptures = window_box(mail, rank), recapture_box(mail, rank)
        self._reports = report_box(mail, rank)
        self._hash = spec_hash(spec)
        self._staged = _Staged(config)
        self._waited, self._tokens = 0.0, 0
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fetcher = Fetcher(store, spec, device, buffer_bytes=config.buffer_bytes)
        self._thread = threading.Thread(target=self._work, name=f"fetch, rank {rank}", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[FeatureBatch]:
        return self

    def __next__(self) -> FeatureBatch:
        """Hand out the next batch.

        Raises:
            StopIteration: at the end of the plan.
            StreamStopped: on all ranks before the same step, if the producer was stopped.
            StreamFailed: what ended the producer or rank 0's dispatcher.
            StoreError: if the store cannot be read.
        """
        began = time.perf_counter()
        batch, ready = self._staged.take()
        if ready is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(ready)
            for states in (batch.hidden, batch.last_hidden):
                if states is not None:
                    states.record_stream(current)
        self._waited += time.perf_counter() - began
        self._tokens += batch.tokens.shape[0]
        return batch

    def acknowledge(self, step: int) -> None:
        """Optimizer step `step` was taken on this rank: its features may be freed. Does not block."""
        self._reports.send({"acknowledged": step})

    def stats(self) -> StreamStats:
        """What happened since the last call; `capture_seconds` is the time that the trainer waited."""
        waited = self._waited
        stats = StreamStats(lambda: waited, self._tokens, self._staged.peak_bytes())
        self._waited, self._tokens = 0.0, 0
        return stats

    def close(self) -> None:
        """Stop fetching and give everything back; on every rank, before rank 0 closes its dispatcher."""
        self._staged.close()
        self._thread.join()
        self._fetcher.close()
        self._reports.send({"closed": True})

    def _work(self) -> None:
        """The thread: fetch, step by step; whatever ends it reaches the trainer's thread in its place."""
        try:
            if self._side is None:
                self._fetch_all()
            else:
                with torch.cuda.device(self._device), torch.cuda.stream(self._side):
                    self._fetch_all()
            self._staged.end(StopIteration())
        except _Closed:
            return
        except BaseException as error:
            self._staged.end(error)

    def _fetch_all(self) -> None:
        for step in self._steps:
            window = self._next_window(step + 1)
            own = self._plan.micro_batches(self._plan.window(step), self._rank)
            for tasks, refs in zip(own, window, strict=True):
                rows = [self._prompts.row(task.row, (task.epoch, task.position)) for task in tasks]
                self._staged.wait_for_room(sum(ref.nbytes for ref in refs))
                batch = self._fetch(rows, refs)
                ready = None if self._side is None else self._side.record_event()
                self._staged.put(batch, ready)

    def _next_window(self, step: int) -> list[list[FeatureRef]]:
        """This rank's refs of a step, by micro-step.

        Raises:
            StreamStopped: if there are none, as the producer was stopped.
        """
        message = self._receive(self._windows)
        if "end" in message:
            raise StreamStopped(f"the producer was stopped: features end after step {message['end']}")
        assert message["step"] == step, f"step {message['step']} received, {step} is next"
        return [[FeatureRef.from_json(ref) for ref in refs] for refs in message["refs"]]

    def _fetch(self, rows: Sequence[PromptRow], refs: Sequence[FeatureRef]) -> FeatureBatch:
        """One batch, its states on the device once the side stream has passed."""
        dtype = getattr(torch, self._spec.dtype)
        total, hidden_size = sum(len(row.input_ids) for row in rows), self._spec.hidden_size
        hidden = torch.empty(total, len(self._spec.layer_ids) * hidden_size, dtype=dtype, device=self._device)
        last = None
        if self._spec.final_state:
            last = torch.empty(total, hidden_size, dtype=dtype, device=self._device)
        first = 0
        for row, ref in zip(rows, refs, strict=True):
            own = slice(first, first + len(row.input_ids))
            self._fetch_row(row, ref, hidden[own], None if last is None else last[own])
            first = own.stop
        return feature_batch(rows, hidden, last, self._spec)

    def _fetch_row(self, row: PromptRow, ref: FeatureRef, hidden: Tensor, last: Tensor | None) -> None:
        """Fill a sample's states; what is missing, short or changed is captured anew first."""
        tries = 0
        while True:
            try:
                self._require(row, ref)
                self._fetcher.fetch(ref, hidden, last)
                return
            except (MissingObject, ShortObject, CorruptObject) as error:
                print(f"rank {self._rank}: {error}; sample {row.sample_id} is asked for again", flush=True)
                self._reports.send({"lost": row.position, "key": ref.key})
                ref = FeatureRef.from_json(self._receive(self._recaptures)["ref"])
            except StoreError:
                tries += 1
                if tries == _STORE_TRIES:
                    raise
                time.sleep(_STORE_RETRY_SECONDS)

    def _require(self, row: PromptRow, ref: FeatureRef) -> None:
        found = ref.sample_id, ref.rows, ref.spec_hash
        if found != (row.sample_id, len(row.input_ids), self._hash):
            raise ValueError(
                f"the ledger's ref {ref.key} is of {ref.sample_id} ({ref.rows} tokens, contract "
                f"{ref.spec_hash:.12}); required: {row.sample_id} ({len(row.input_ids)} tokens, "
                f"contract {self._hash:.12})"
            )

    def _receive(self, box: Mailbox) -> dict:
        """The next message of a mailbox.

        Raises:
            StreamFailed: if a failure was announced, or rank 0 does not answer.
        """
        while (message := box.receive()) is None:
            if self._staged.closing:
                raise _Closed
            if (waited := self._staged.waited()) > self._config.wait_seconds + _PEER_SECONDS:
                raise StreamFailed(f"rank 0 sent nothing in the {waited:.0f} s that this rank waited")
            time.sleep(_POLL_SECONDS)
        return message


class _Staged:
    """Batches between the thread that fetches and the one that trains, bounded in number and bytes."""

    def __init__(self, config: ConsumerConfig) -> None:
        self.closing = False
        self._config = config
        self._batches: deque[tuple[FeatureBatch, torch.cuda.Event | None]] = deque()
        self._end: BaseException | None = None
        self._bytes = self._peak = 0
        self._waits_since: float | None = None
        self._changed = threading.Condition()

    def wait_for_room(self, nbytes: int) -> None:
        """Block until a batch of `nbytes` may be fetched: always, if none is staged."""
        with self._changed:
            while self._batches and not self.closing and not self._fits(nbytes):
                self._changed.wait()
            if self.closing:
                raise _Closed

    def put(self, batch: FeatureBatch, ready: torch.cuda.Event | None) -> None:
        """Stage a batch whose states are on the device once `ready` has passed."""
        with self._changed:
            self._batches.append((batch, ready))
            self._bytes += batch.state_bytes
            self._peak = max(self._peak, self._bytes)
            self._changed.notify_all()

    def end(self, error: BaseException) -> None:
        """Have `take` raise, behind what is staged."""
        with self._changed:
            self._end = error
            self._changed.notify_all()

    def take(self) -> tuple[FeatureBatch, torch.cuda.Event | None]:
        """The next batch; waits for it. Ends with what ended the thread that fetches."""
        with self._changed:
            self._waits_since = time.monotonic()
            while not self._batches:
                if self._end is not None:
                    raise self._end
                self._changed.wait()
            self._waits_since = None
            batch, ready = self._batches.popleft()
            self._bytes -= batch.state_bytes
            self._changed.notify_all()
        return batch, ready

    def waited(self) -> float:
        """Seconds since the training thread has been waiting; 0 if it does not."""
        since = self._waits_since
        return 0.0 if since is None else time.monotonic() - since

    def peak_bytes(self) -> int:
        """Most bytes staged since the last call."""
        with self._changed:
            peak, self._peak = self._peak, self._bytes
        return peak

    def close(self) -> None:
        """Forget what is staged and end the thread."""
        with self._changed:
            self.closing = True
            self._batches.clear()
            self._changed.notify_all()

    def _fits(self, nbytes: int) -> bool:
        limit = self._config.ahead_bytes
        return len(self._batches) < self._config.ahead_batches and (
            limit is None or self._bytes + nbytes <= limit
        )
