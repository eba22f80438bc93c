"""The prompt cache: tokenised samples in an Arrow file that every rank maps into memory.

Invariants:
- The file's name is a hash of all that decides its content: the prompt files' bytes, tokenizer and chat
  template, and each setting. Nothing stale can be opened.
- One process builds; the others wait for its lock, never in a collective.
- Files appear whole: written under another name, synced, renamed. The report is renamed last and records the
  Arrow file's size, which detects a truncated one.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

from specforge_capture.locks import builder_lock
from specforge_capture.prompts.chat import ChatRenderer
from specforge_capture.prompts.checksum import file_sha256, require_checksum
from specforge_capture.prompts.masks import NO_ANSWER
from specforge_capture.prompts.samples import Progress, PromptReport, Sample, SampleReader
from specforge_capture.targets.base import PromptRow
from specforge_config.data import DataConfig

CACHE_VERSION = 1
"""Raised whenever the same inputs would give other samples than before."""
STALL_SECONDS = 600.0
"""Without a sign of life from the builder for so long, a waiting process gives up."""

_SCHEMA = pa.schema(
    {"sample_id": pa.string(), "input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8())}
)
# Rows of every record batch but the last, so that a row's batch follows from its index.
_BATCH_ROWS = 256


class PromptSet:
    """Samples in a memory-mapped Arrow file; rows are views of it, without a copy.

    Args:
        path: the Arrow file.
        report: what became of the rows it was built from.
        fingerprint: hash of the samples' tokens and masks.
    """

    def __init__(self, path: Path, report: PromptReport, fingerprint: str) -> None:
        self.path = path
        self.report = report
        self.fingerprint = fingerprint
        self._reader = pa.ipc.open_file(pa.memory_map(str(path)))

    def __len__(self) -> int:
        return self.report.samples

    def __getitem__(self, index: int) -> PromptRow:
        return self.row(index)

    def lengths(self) -> np.ndarray:
        """Tokens of each sample, [len(self)] int64."""
        batches = (self._reader.get_batch(i)["input_ids"] for i in range(self._reader.num_record_batches))
        return np.concatenate([np.diff(ids.offsets.to_numpy()) for ids in batches]).astype(np.int64)

    def row(self, index: int, position: tuple[int, int] = (0, 0)) -> PromptRow:
        """Sample `index` under the task id `position`.

        Raises:
            IndexError: if there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        batch, offset = divmod(index, _BATCH_ROWS)
        columns = self._reader.get_batch(batch)
        ids, mask = columns["input_ids"], columns["loss_mask"]
        return PromptRow(
            sample_id=columns["sample_id"][offset].as_py(),
            input_ids=ids[offset].values.to_numpy(),
            loss_mask=mask[offset].values.to_numpy().view(bool),
            position=position,
        )


def open_or_build(
    data: DataConfig,
    renderer: ChatRenderer,
    *,
    vocab_size: int,
    mask_token_id: int | None = None,
    progress: Progress | None = None,
    stall_seconds: float = STALL_SECONDS,
) -> PromptSet:
    """The samples of `data`, from the cache or built into it. Safe to call from every rank at once.

    Args:
        data: the configuration.
        renderer: tokenizer and chat template.
        vocab_size: rows of the target's embedding.
        mask_token_id: the draft's mask token, which must not occur in data.
        progress: called by the building process.
        stall_seconds: how long another builder may show no sign of life.

    Raises:
        ValueError: if a file is missing or has another checksum than `data.sha256`, if no row is usable
            (naming the reasons and the template), if a row is unusable under `data.strict`, or if the cache
            cannot be written.
    """
    folder, key = Path(data.cache_dir), cache_key(data, renderer, vocab_size, mask_token_id)
    lock = folder / f"{key}.lock"
    prompts = _open(folder, key)
    if prompts is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with builder_lock(lock, "the prompt cache", "data.cache_dir", stall_seconds) as beat:
                prompts = _open(folder, key)
                if prompts is None:
                    reader = SampleReader(data, renderer, vocab_size, mask_token_id)
                    prompts = _build(folder, key, reader, beat, progress)
        except OSError as error:
            raise ValueError(f"data.cache_dir: cannot write the prompt cache in {folder}: {error}") from error
    if data.strict and prompts.report.dropped:
        raise ValueError(f"data.strict: {prompts.report.dropped[0]}")
    return prompts


def cache_key(data: DataConfig, renderer: ChatRenderer, vocab_size: int, mask_token_id: int | None) -> str:
    """32 hex digits over everything that decides the samples.

    Raises:
        ValueError: if a prompt file is missing or has another checksum than `data.sha256`.
    """
    require_checksum(data)
    files = [(Path(path).name, file_sha256(Path(path))) for path in data.train]
    settings = ("format", "max_length", "overlong", "supervise", "thinking", "enable_thinking")
    known = {
        "version": CACHE_VERSION,
        "files": files,
        "tokenizer": renderer.hash,
        "vocab_size": vocab_size,
        "mask_token_id": mask_token_id,
        **{name: getattr(data, name) for name in settings},
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:32]


def _open(folder: Path, key: str) -> PromptSet | None:
    """The cached samples; None if there are none, or what lies there is not whole."""
    path = folder / f"{key}.arrow"
    try:
        known = json.loads((folder / f"{key}.json").read_text())
        if path.stat().st_size != known["bytes"]:
            return None
        prompts = PromptSet(path, PromptReport.from_json(known["report"]), known["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid):
        return None
    metadata = prompts._reader.schema.metadata or {}
    return prompts if metadata.get(b"key") == key.encode() else None


def _build(
    folder: Path, key: str, reader: SampleReader, beat: Callable[[], None], progress: Progress | None
) -> PromptSet:
    def report_progress(rows: int, share: float) -> None:
        beat()
        if progress:
            progress(rows, share)

    arrow, summary = folder / f"{key}.arrow.tmp", folder / f"{key}.json.tmp"
    try:
        fingerprint = _write(arrow, key, reader.samples(report_progress))
        if not reader.report.samples:
            raise ValueError(_nothing_usable(reader))
        known = {"bytes": arrow.stat().st_size, "fingerprint": fingerprint, "report": reader.report.to_json()}
        with summary.open("w") as file:
            json.dump(known, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(arrow, folder / f"{key}.arrow")
        os.replace(summary, folder / f"{key}.json")
    finally:
        arrow.unlink(missing_ok=True)
        summary.unlink(missing_ok=True)
    return PromptSet(folder / f"{key}.arrow", reader.report, fingerprint)


def _write(path: Path, key: str, samples: Iterable[Sample]) -> str:
    """Write samples in equal record batches; returns the hash of their tokens and masks."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        with pa.ipc.new_file(file, _SCHEMA.with_metadata({"key": key})) as writer:
            pending: list[Sample] = []
            for sample in samples:
                digest.update(len(sample.input_ids).to_bytes(8, "little"))
                digest.update(sample.input_ids.tobytes())
                digest.update(sample.loss_mask.tobytes())
                pending.append(sample)
                if len(pending) == _BATCH_ROWS:
                    writer.write_batch(_record_batch(pending))
                    pending = []
            if pending:
                writer.write_batch(_record_batch(pending))
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _record_batch(samples: list[Sample]) -> pa.RecordBatch:
    offsets = pa.array(np.cumsum([0, *(len(s.input_ids) for s in samples)]), pa.int32())
    ids = np.concatenate([s.input_ids for s in samples])
    mask = np.concatenate([s.loss_mask for s in samples]).view(np.uint8)
    columns = [
        pa.array([s.sample_id for s in samples]),
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(mask)),
    ]
    return pa.record_batch(columns, schema=_SCHEMA)


def _nothing_usable(reader: SampleReader) -> str:
    common = reader.report.reasons().most_common(3)
    reasons = "; ".join(f"{count} × {reason}" for reason, count in common)
    if any(reason == NO_ANSWER for reason, _ in common):
        reasons += " (prompts alone are answered first: specforge-capture regenerate)"
    files = ", ".join(reader.data.train)
    return (
        f"none of the {reader.report.rows} rows of {files} can be trained on under {reader.renderer.name}: "
        f"{reasons or 'the files hold no rows'}"
    )
