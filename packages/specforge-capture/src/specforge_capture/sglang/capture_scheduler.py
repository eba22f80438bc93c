"""The scheduler's side of a capture server: a request's way from its queue to its held answer.

A request with `sampling_params.custom_params.spec_capture` is checked and cut off from the prefix cache as it
enters the queue; each prefill's rows go to the sink; its answer is held until the sink says that all pieces
are readable, and then carries their `FeatureRef`. Other requests pass untouched.

Invariants:
- Ranks of tensor parallelism take the same decisions: what steers SGLang (refusals, the prefix cache)
  follows from the request and its rows alone, which all ranks see. The sink, its failures and the held
  answers live on the one rank that speaks to clients, and touch answers only.
- A capture is of all rows of its request or fails: rows that a cache hid are counted.
- The writer's thread touches no request; it hands results to the scheduler's loop through a queue.

What SGLang calls a request (`Req`) carries its capture in one attribute, so nothing is left of it when SGLang
drops the request.
"""

import queue
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any
from weakref import WeakValueDictionary

import torch

from specforge_capture.refs import FeatureRef, feature_width
from specforge_capture.sglang import hooks
from specforge_capture.sglang.capture_model import ServedModel
from specforge_capture.sglang.options import CaptureSettings
from specforge_capture.sink import Capture, Sink
from specforge_capture.stores.base import open_store
from specforge_capture.wire import FIELD, CaptureRequest, ServerDescription
from specforge_config.features import spec_hash

_ATTRIBUTE = "_specforge_capture"


class _Pending:
    """One request's capture.

    `rows` and `fault` follow from what all ranks see. The rest is the writing rank's.
    """

    def __init__(self, asked: CaptureRequest) -> None:
        self.asked = asked
        self.rows = 0
        """Rows that prefills have shown."""
        self.fault: str | None = None
        """Why its rows cannot be complete."""
        self.capture: Capture | None = None
        """The sink's side, from the first rows until it is finished or dropped."""
        self.result: FeatureRef | Exception | None = None
        """What came of it."""
        self.held: Callable[[], None] | None = None
        """Sends the held answer."""
        self.aborted = False

    @property
    def complete(self) -> bool:
        return self.rows == len(self.asked.input_ids)

    def drop(self) -> None:
        """Let the sink forget it and remove what it stored."""
        if self.capture is not None:
            self.capture.drop()
            self.capture = None


class _Whole(list[Any]):
    """One entry a request in SGLang's `customized_info`, which is cut per output token: any slice is all."""

    def __getitem__(self, index: Any) -> Any:
        return list(self) if isinstance(index, slice) else super().__getitem__(index)


class CaptureScheduler:
    """The hooks of one scheduler process, and what they share.

    Args:
        settings: what the server was told.
    """

    def __init__(self, settings: CaptureSettings) -> None:
        self._settings = settings
        self._hash = spec_hash(settings.spec)
        self._model: ServedModel | None = None
        self._sink: Sink | None = None
        self._live: WeakValueDictionary[str, _Pending] = WeakValueDictionary()
        """Captures by key, on the writing rank, until their answers are sent."""
        self._results: queue.SimpleQueue[tuple[_Pending, FeatureRef | Exception]] = queue.SimpleQueue()

    def registrations(self) -> list[tuple[str, Callable[..., Any], str]]:
        """(SGLang's function, hook, kind) of each hook."""
        return [
            (hooks.LOAD, self._load_model, "around"),
            (hooks.FORWARD, self._forward, "around"),
            (hooks.ENQUEUE, self._admit, "before"),
            (hooks.ABORT, self._abort, "after"),
            (hooks.INFORM, self._describe, "after"),
            (hooks.RECEIVE, self._settle, "after"),
            (hooks.STREAM, self._answer, "around"),
        ]

    # At the start -------------------------------------------------------------------------------------------

    def _load_model(self, load: Callable[..., Any], runner: Any, *rest: Any, **options: Any) -> Any:
        """The store is opened first: weights may take an hour."""
        from sglang.srt.distributed.parallel_state import get_tensor_model_parallel_rank

        hooks.require_hooked(hooks.IN_SCHEDULER)
        settings = self._settings
        if get_tensor_model_parallel_rank() == 0:
            self._sink = Sink(
                open_store(settings.store, contribute=True),
                self._hash,
                feature_width(settings.spec),
                settings.spec.dtype,
                ring_bytes=settings.ring_bytes,
                max_pending_bytes=settings.pending_bytes,
            )
        result = load(runner, *rest, **options)
        self._model = ServedModel(runner, settings.spec)
        return result

    def _describe(self, information: dict[str, Any], scheduler: Any) -> None:
        hooks.require_hooked(hooks.IN_SCHEDULER)
        information[FIELD] = ServerDescription.of(self._settings.spec).to_json()

    # From the queue to the sink, alike on every rank --------------------------------------------------------

    def _admit(self, scheduler: Any, request: Any, *rest: Any, **options: Any) -> None:
        parameters = request.sampling_params.custom_params
        if not isinstance(parameters, dict) or FIELD not in parameters or hasattr(request, _ATTRIBUTE):
            return
        if request.to_finish is not None:  # refused already
            return
        body = {"input_ids": request.origin_input_ids, "sampling_params": {"custom_params": parameters}}
        try:
            asked = CaptureRequest.from_json(body)
            self._require_capturable(request, asked)
        except ValueError as error:
            request.set_finish_with_abort(str(error))
            return
        setattr(request, _ATTRIBUTE, _Pending(asked))
        request.extra_key = f"{FIELD}/{asked.key}"

    def _require_capturable(self, request: Any, asked: CaptureRequest) -> None:
        name = f"capture request {asked.key!r}"
        if asked.spec_hash != self._hash:
            raise ValueError(f"{name} is for contract {asked.spec_hash}; this server captures {self._hash}")
        if request.rid != asked.key:
            raise ValueError(f"{name} has the rid {request.rid!r}; required: its key, and n = 1")
        unlike = {
            "stream": request.stream,
            "input_embeds": request.input_embeds is not None,
            "multimodal data": request.multimodal_inputs is not None,
            "session_params": request.session is not None,
            "lora_path": request.lora_id is not None,
        }
        if found := [what for what, there in unlike.items() if there]:
            raise ValueError(f"{name} has {', '.join(found)}: not implemented yet; required: tokens alone")

    def _forward(
        self, forward: Callable[..., Any], worker: Any, batch: Any = None, *rest: Any, **options: Any
    ) -> Any:
        assert self._model is not None
        self._model.discard()
        if batch is None or not batch.forward_mode.is_extend():
            result = forward(worker, batch, *rest, **options)
        else:
            requests, starts, counts = list(batch.reqs), list(batch.prefix_lens), list(batch.extend_lens)
            result = forward(worker, batch, *rest, **options)
            columns = self._model.columns([request.rid for request in requests], sum(counts))
            first = 0
            for request, start, count in zip(requests, starts, counts, strict=True):
                pending = getattr(request, _ATTRIBUTE, None)
                if pending is not None and pending.fault is None and not pending.complete:
                    self._collect(pending, [column[first : first + count] for column in columns], start)
                    if pending.complete:
                        # Only now: between chunks of a prompt SGLang keeps its prefix in the cache.
                        request.skip_radix_cache_insert = True
                first += count
        self._model.discard()
        return result

    def _collect(self, pending: _Pending, columns: Sequence[torch.Tensor], start: int) -> None:
        """Take the rows from `start` on that are new; a prompt that was set back shows some again."""
        known = pending.rows - start
        if known < 0:
            pending.fault = f"a prefix cache hid {-known} of its rows"
            pending.drop()
        elif (found := len(columns[0]) - known) > 0:
            first, pending.rows = pending.rows, pending.rows + found
            if self._sink is not None and not pending.aborted and pending.result is None:
                self._store(pending, [column[known:] for column in columns], first)

    def _store(self, pending: _Pending, columns: Sequence[torch.Tensor], first: int) -> None:
        """Hand rows to the sink, from row `first` of the prompt on. On the writing rank."""
        assert self._sink is not None
        asked = pending.asked
        if first == 0:
            try:
                pending.capture = self._sink.open(asked.key, asked.sample_id, len(asked.input_ids))
            except ValueError as error:  # its key is under way
                pending.result = error
                return
            self._live[asked.key] = pending
        assert pending.capture is not None
        pending.capture.add(torch.cat(list(columns), dim=-1), first)
        if pending.complete:
            pending.capture.finish(lambda result: self._results.put((pending, result)))

    # Answers, on the rank that writes -----------------------------------------------------------------------

    def _answer(
        self,
        send: Callable[..., None],
        streamer: Any,
        requests: Sequence[Any],
        return_logprob: bool,
        skip: Any = None,
        **options: Any,
    ) -> None:
        """Hold finished captures that are being written. The others go out, each capture in a message of its
        own, as SGLang pads `customized_info` over a message's requests."""
        rest = []
        for request in requests:
            pending = getattr(request, _ATTRIBUTE, None)
            if self._sink is None or pending is None or request is skip or not request.finished():
                rest.append(request)
                continue
            answer = partial(
                self._conclude, request, pending, partial(send, streamer, [request], return_logprob)
            )
            writing = pending.complete and pending.result is None and not pending.aborted
            if writing and not _is_aborted(request):
                pending.held = answer
            else:
                answer()
        if rest or not requests:
            send(streamer, rest, return_logprob, skip, **options)

    def _settle(self, received: Any, *rest: Any, **options: Any) -> None:
        """Once in each turn of the scheduler's loop."""
        while not self._results.empty():
            pending, pending.result = self._results.get()
            if pending.held is not None:
                pending.held()

    def _abort(self, result: None, scheduler: Any, abort: Any) -> None:
        for key, pending in list(self._live.items()):
            if abort.abort_all or key.startswith(abort.rid):  # as SGLang matches them
                pending.aborted = True
                if pending.held is not None:
                    pending.held()
                else:
                    pending.drop()

    def _conclude(self, request: Any, pending: _Pending, send: Callable[[], None]) -> None:
        """Write the outcome onto a finished request, let go of its capture, and send the answer."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        asked, result = pending.asked, pending.result
        delattr(request, _ATTRIBUTE)
        pending.held = None
        if self._live.get(asked.key) is pending:
            del self._live[asked.key]
        if isinstance(result, FeatureRef) and not pending.aborted and not _is_aborted(request):
            own = {FIELD: _Whole([result.to_json()])}
            request.customized_info = {**(request.customized_info or {}), **own}
        else:
            pending.drop()
            if pending.aborted:
                request.finished_reason = FINISH_ABORT("aborted while its features were being stored")
            elif not _is_aborted(request):
                reason = pending.fault or result or f"{pending.rows} of {len(asked.input_ids)} rows came"
                request.finished_reason = FINISH_ABORT(
                    f"capture of sample {asked.sample_id!r} failed: {reason}",
                    HTTPStatus.INTERNAL_SERVER_ERROR,
                    "CaptureFailed",
                )
        send()


def _is_aborted(request: Any) -> bool:
    return request.finished_reason is not None and request.finished_reason.to_json()["type"] == "abort"
