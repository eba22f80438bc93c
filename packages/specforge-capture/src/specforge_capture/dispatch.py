"""Rank 0's dispatcher: hands whole optimizer windows from the ledger to the ranks, and brings back what they
say.

Invariant: a rank gets refs of whole windows only, so that all ranks stop before the same optimizer step; and
a window is acknowledged once every rank has acknowledged it, so that no rank still needs its objects.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from specforge_capture.ledger import Ledger
from specforge_capture.mail import Mailbox, StreamFailed, announce_failure
from specforge_capture.prompts.plan import PromptPlan
from specforge_config.features import CaptureSpec
from specforge_config.producer import ConsumerConfig

_POLL_SECONDS = 0.02
_CLOSE_SECONDS = 30.0


def window_box(mail: dist.Store, rank: int) -> Mailbox:
    """Windows on their way to a rank: `{"step", "refs"}`, refs by micro-step, or `{"end": step}`."""
    return Mailbox(mail, f"windows/{rank}")


def recapture_box(mail: dist.Store, rank: int) -> Mailbox:
    """New refs of samples that a rank lost: `{"ref"}`, in the order in which it reported them."""
    return Mailbox(mail, f"recaptures/{rank}")


def report_box(mail: dist.Store, rank: int) -> Mailbox:
    """What a rank tells: `{"acknowledged": step}`, `{"lost": task id, "key"}`, `{"closed": true}`."""
    return Mailbox(mail, f"reports/{rank}")


class Dispatcher:
    """A thread of rank 0, from its construction to `close`.

    Args:
        folder: the run's folder, where the ledger lies; the producer runs on this node.
        plan: the order of prompts.
        spec: the capture contract.
        config: how long to wait.
        mail: a key-value store that all ranks reach: the process group's own.
        start_step: the trainer's checkpoint; everything behind it is captured anew.
        total_steps: optimizer steps of the run.
        tell: takes lines for the log: what was captured and not trained.

    Raises:
        ValueError: if the ledger is of another run, or another trainer has it open.
    """

    def __init__(
        self,
        folder: Path,
        plan: PromptPlan,
        spec: CaptureSpec,
        config: ConsumerConfig,
        mail: dist.Store,
        *,
        start_step: int = 0,
        total_steps: int,
        tell: Callable[[str], None] = print,
    ) -> None:
        self._ledger = Ledger(folder, plan, spec, "trainer")
        self._plan, self._config, self._mail, self._tell = plan, config, mail, tell
        self._total, self._step = total_steps, start_step
        ranks = range(plan.islands * plan.tp_size)
        self._windows = [window_box(mail, rank) for rank in ranks]
        self._recaptures = [recapture_box(mail, rank) for rank in ranks]
        self._reports = [report_box(mail, rank) for rank in ranks]
        self._acknowledged = [start_step for _ in ranks]
        self._closed = [False for _ in ranks]
        self._written = start_step
        self._lost: dict[int, tuple[int, int]] = {}  # what each rank waits for; it waits for one at a time
        self._ended = False
        self._producer_seen = self._fed = time.monotonic()
        self._tell_rewound(start_step)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dispatcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the streams of all ranks were closed: settle what was captured and not trained, and close the
        ledger's session. The producer then frees everything and ends."""
        self._closing.set()
        self._thread.join()
        try:
            if settled := self._ledger.close_session():
                self._tell(f"{settled} samples were captured and not trained: they are settled and freed")
        finally:
            self._ledger.close()

    def _tell_rewound(self, start_step: int) -> None:
        rewound = self._ledger.open_session(start_step, self._total)
        if rewound.unfinished:
            self._tell(
                f"{rewound.unfinished} samples were captured after step {start_step}, the checkpoint: they "
                "are captured anew"
            )
        if rewound.settled:
            self._tell(
                f"{rewound.settled} samples had been captured, settled and freed without being trained when "
                "the run ended before: they are captured anew"
            )

    def _run(self) -> None:
        try:
            deadline = None
            while not (self._closing.is_set() and all(self._closed)):
                if self._closing.is_set():
                    deadline = deadline or time.monotonic() + _CLOSE_SECONDS
                    if time.monotonic() > deadline:
                        return  # a rank that failed does not say that it closes
                self._read_reports()
                if not self._closing.is_set():
                    self._hand_out()
                    self._watch_producer()
                time.sleep(_POLL_SECONDS)
        except StreamFailed:
            return
        except BaseException as error:  # every rank raises it, this one too
            announce_failure(self._mail, f"{type(error).__name__}: {error}")

    def _read_reports(self) -> None:
        for rank, box in enumerate(self._reports):
            while (report := box.receive()) is not None:
                self._take(rank, report)
        done = min(self._acknowledged)
        if done > self._written:
            self._ledger.acknowledge(done)
            self._written = done

    def _take(self, rank: int, report: dict[str, Any]) -> None:
        if "acknowledged" in report:
            self._acknowledged[rank] = report["acknowledged"]
        elif "lost" in report:
            task = (report["lost"][0], report["lost"][1])
            found = self._ledger.lose(task, report["key"])
            assert found, f"rank {rank} lost {report['key']}, which was not dispatched to it"
            self._lost[rank] = task
        else:
            self._closed[rank] = True

    def _hand_out(self) -> None:
        """Send what the producer committed: recaptured samples, and the next whole windows."""
        for rank, task in list(self._lost.items()):
            if (ref := self._ledger.dispatch_again(task)) is not None:
                self._recaptures[rank].send({"ref": ref.to_json()})
                del self._lost[rank]
                self._fed = time.monotonic()
        while self._step < self._total and (entries := self._ledger.dispatch(self._step + 1)) is not None:
            self._step += 1
            self._fed = time.monotonic()
            refs = [entry.ref.to_json() for entry in entries if entry.ref]
            for rank, box in enumerate(self._windows):
                box.send({"step": self._step, "refs": self._plan.micro_batches(refs, rank)})

    def _watch_producer(self) -> None:
        """End the stream where the producer ended it; fail where nothing more will come.

        Raises:
            RuntimeError: what ended the producer.
            TimeoutError: if no producer is running, or the ranks have waited for too long.
        """
        now, state = time.monotonic(), self._ledger.state()
        if state.failure is not None:
            raise RuntimeError(f"the producer failed: {state.failure}")
        if state.ended is not None and state.ended == self._step < self._total and not self._ended:
            self._tell(f"the producer was stopped: features end after step {self._step} of {self._total}")
            for box in self._windows:
                box.send({"end": self._step})
            self._ended = True
        hungry = self._lost or (min(self._acknowledged) == self._step < self._total and not self._ended)
        if not hungry:
            self._fed = now
        if not hungry or self._ledger.present("producer"):
            self._producer_seen = now
        if now - self._producer_seen > self._config.producer_seconds:
            raise TimeoutError(
                f"no producer has been running on {self._ledger.path} for {now - self._producer_seen:.0f} s: "
                "it was killed or never started on this node; look at its log, then start the run again"
            )
        if now - self._fed > self._config.wait_seconds:
            waited = f"sample {next(iter(self._lost.values()))}" if self._lost else f"step {self._step + 1}"
            raise TimeoutError(
                f"no features of {waited} came within {now - self._fed:.0f} s: look at the logs of the "
                "producer and the servers, or raise deployment.consumer.wait_seconds"
            )
