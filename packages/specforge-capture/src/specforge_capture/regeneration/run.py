"""Regeneration: every prompt of the recipe is answered by the target.

    prompt files -> dialogues -> decoding batch -> journal -> output and manifest

The batch decodes in this process (`hf`) or on SGLang servers (`sglang`).

Next turns of running dialogues go before new rows, so that few dialogues are open at a time.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from specforge_capture.memory import naming_budgets
from specforge_capture.prompts.chat import ChatRenderer, load_tokenizer
from specforge_capture.prompts.sources import Conversation, Rejected, SourceRow, detect_format, read_rows
from specforge_capture.prompts.special_tokens import resolve_special_tokens
from specforge_capture.regeneration.dialogue import Dialogue
from specforge_capture.regeneration.journal import (
    Journal,
    file_sha256,
    finished_manifest,
    open_journal,
    output_path,
)
from specforge_capture.regeneration.served import PROBE_SECONDS, AnswerClient, ServedBatch
from specforge_capture.sglang.answer_servers import answer_servers
from specforge_capture.targets.batch import Answer, DecodingBatch, Request
from specforge_capture.targets.loading import load_model
from specforge_capture.targets.sampling import Sampling
from specforge_config.run import RunConfig
from specforge_config.target import read_target_shape, target_revision

Report = Callable[[int, int, int], None]
"""Called with the rows that are done, all rows, and the tokens written by this start."""


@dataclass(frozen=True)
class _Answerer:
    """What all rows share."""

    config: RunConfig
    renderer: ChatRenderer
    batch: DecodingBatch | ServedBatch
    journal: Journal

    def next_request(self, dialogue: Dialogue) -> Request | None:
        limit = self.config.regeneration.max_new_tokens
        return dialogue.next_request(self.renderer, self.config.data.max_length, limit)


def regenerate(
    config: RunConfig, report: Report = lambda done, total, tokens: None
) -> tuple[dict[str, Any], bool]:
    """Answer the prompts of a run whose target is a saved model.

    Args:
        config: the run.
        report: told of the progress.

    Returns:
        The manifest, and whether the output had been finished before.

    Raises:
        ValueError: for no prompts, unreadable files, settings that another start of the same output had
            otherwise, servers of another target, and under `data.strict` for the first row that cannot be
            answered.
        ServerDown: if no SGLang server answers.
        RequestFailed: if one failed a request again and again.
    """
    if config.dummy_weights:
        raise ValueError("engine.load_format is dummy; required: auto, for answers of the target's own")
    rows = list(_rows(config))
    tokenizer = load_tokenizer(config.target.path)
    renderer = ChatRenderer(tokenizer, config.data.chat_template, config.data.enable_thinking)
    settings = _settings(config, renderer)
    output = output_path(config)
    if manifest := finished_manifest(output, settings):
        return manifest, True
    started = time.monotonic()
    special = resolve_special_tokens(tokenizer, config.target.path, renderer)
    with (
        open_journal(output, settings) as journal,
        _answering(config, settings["dtype"], special.stop, output) as (batch, engine),
        naming_budgets("answering prompts", "lower regeneration.batch_size or data.max_length"),
    ):
        loaded = time.monotonic()
        tokens = _answer(_Answerer(config, renderer, batch, journal), rows, report)
        ended = time.monotonic()
        facts = {
            "target": config.target.path,
            **engine,
            **_count(journal),
            "seconds": round(ended - started, 1),
        }
        facts["tokens_per_s"] = round(tokens / max(ended - loaded, 1e-9), 1)
        return journal.finish(facts), False


def _rows(config: RunConfig) -> Iterator[tuple[str, SourceRow]]:
    """Each row with its `file:line`."""
    settings = config.regeneration
    if not settings.prompts:
        raise ValueError("regeneration.prompts is empty; required: files of prompts to answer")
    for path in map(Path, settings.prompts):
        form = detect_format(path)
        if form in ("text", "tokens"):
            raise ValueError(f"regeneration.prompts: {path} holds rows of {form}, required: chats")
        taken = 0
        for rows, _ in read_rows(path, form):
            for row in rows[: None if settings.max_prompts is None else settings.max_prompts - taken]:
                yield f"{path.name}:{row.line}", row
            taken += len(rows)
            if settings.max_prompts is not None and taken >= settings.max_prompts:
                break


def _settings(config: RunConfig, renderer: ChatRenderer) -> dict[str, Any]:
    """Everything that decides the answers; the batch size does not."""
    target, how = config.target, config.regeneration
    shape = read_target_shape(target.path)
    return {
        "revision": target.revision or target_revision(target.path),
        **_engine_settings(config),
        "dtype": target.element_type(shape),
        "template": renderer.hash,
        "template_settings": renderer.settings,
        "prompts": [[Path(path).name, file_sha256(Path(path))] for path in how.prompts],
        "max_prompts": how.max_prompts,
        "max_length": config.data.max_length,
        "max_new_tokens": how.max_new_tokens,
        "temperature": how.temperature,
        "top_p": how.top_p,
        "seed": how.seed,
    }


def _engine_settings(config: RunConfig) -> dict[str, Any]:
    """Nothing for transformers: outputs of before there was another backend are finished still."""
    if config.target.backend == "hf":
        return {}
    extra = {} if config.regeneration.servers else config.engine.extra
    return {"backend": config.target.backend, **({"engine.extra": extra} if extra else {})}


@contextmanager
def _answering(
    config: RunConfig, dtype: str, stop_ids: Collection[int], output: Path
) -> Generator[tuple[DecodingBatch | ServedBatch, dict[str, Any]]]:
    """What answers, and what the manifest says of it."""
    how, device = config.regeneration, config.deployment.trainer.device
    sampling = Sampling(how.temperature, how.top_p, how.seed)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if config.target.backend == "hf":
        yield DecodingBatch(_load(config, dtype, device), stop_ids, how.batch_size, sampling), {}
        return
    with ExitStack() as stack:
        urls = [f"http://{address}" for address in how.servers] or stack.enter_context(
            answer_servers(config, device, output.with_name(output.name + ".server"))
        )
        served = [AnswerClient(url, PROBE_SECONDS).require(config) for url in urls]
        versions = sorted({f"sglang {one.version}" for one in served})
        clients = [AnswerClient(url, how.answer_seconds) for url in urls]
        batch = stack.enter_context(closing(ServedBatch(clients, stop_ids, how.batch_size, sampling)))
        yield batch, {"engine": ", ".join(versions)}


def _load(config: RunConfig, dtype: str, device: Literal["cpu", "cuda"]) -> PreTrainedModel:
    if device == "cuda":
        torch.set_num_threads(config.deployment.trainer.threads(on_gpu=True))
    model: Any = load_model(config.target.path, getattr(torch, dtype))
    return model.to(device)


def _answer(parts: _Answerer, rows: list[tuple[str, SourceRow]], report: Report) -> int:
    """Answer what the journal does not hold yet; tokens written."""
    batch, journal = parts.batch, parts.journal
    fresh = ((i, *row) for i, row in enumerate(rows) if i not in journal.rows)
    waiting: deque[tuple[Dialogue, Request]] = deque()
    asked: dict[int, Dialogue] = {}
    tokens = 0
    report(len(journal.rows), len(rows), tokens)
    while True:
        while len(waiting) < batch.free and (row := next(fresh, None)) is not None:
            if begun := _begin(parts, *row):
                waiting.append(begun)
        entering = [waiting.popleft() for _ in range(min(batch.free, len(waiting)))]
        asked |= {dialogue.index: dialogue for dialogue, _ in entering}
        batch.admit([request for _, request in entering])
        if not batch.running:
            return tokens
        for request, answer in batch.advance():
            tokens += len(answer.tokens)
            if following := _follow(parts, asked.pop(request.key[0]), request, answer):
                waiting.appendleft(following)
        report(len(journal.rows), len(rows), tokens + batch.unfinished)


def _begin(parts: _Answerer, index: int, sample_id: str, row: SourceRow) -> tuple[Dialogue, Request] | None:
    """The first request of a row; None if it cannot be answered, which the journal notes."""
    with _dropping(parts, index, sample_id):
        if isinstance(row, Rejected):
            raise ValueError(row.reason)
        assert isinstance(row, Conversation)
        dialogue = Dialogue.of(index, sample_id, row)
        request = parts.next_request(dialogue)
        assert request is not None, "a script with a turn to write has a first request"
        return dialogue, request
    return None


def _follow(
    parts: _Answerer, dialogue: Dialogue, request: Request, answer: Answer
) -> tuple[Dialogue, Request] | None:
    """The next request of a dialogue; None at its end, when the journal gets it."""
    with _dropping(parts, dialogue.index, dialogue.sample_id):
        dialogue.add(request, answer, parts.renderer)
        if following := parts.next_request(dialogue):
            return dialogue, following
        parts.journal.add(dialogue.index, dialogue.to_json())
    return None


@contextmanager
def _dropping(parts: _Answerer, index: int, sample_id: str) -> Generator[None]:
    """A row that cannot be used is noted with its reason; under `data.strict` it is an error."""
    try:
        yield
    except ValueError as error:
        if parts.config.data.strict:
            raise ValueError(f"data.strict: {sample_id}: {error}") from error
        parts.journal.add(index, {"id": sample_id, "reason": str(error)})


def _count(journal: Journal) -> dict[str, Any]:
    """The manifest's counts."""
    rows = list(journal.rows.values())
    answered = [row for row in rows if "reason" not in row]
    return {
        "rows": len(rows),
        "answered": len(answered),
        "answers": sum(len(row["answer_tokens"]) for row in answered),
        "answer_tokens": sum(sum(row["answer_tokens"]) for row in answered),
        "length_limited": sum(row["finish"] == "length" for row in answered),
        "inexact": sum(not row["exact"] for row in answered),
        "dropped": [row for row in rows if "reason" in row],
    }
