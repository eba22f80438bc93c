"""`specforge-launch evaluate`: a draft's speculative decoding on prompt sets, at several temperatures.

Each file of prompts is a set. The work is cut into tasks of a few prompts, done one after the other in this
process or by several that share the device: a small target leaves most of a GPU idle. What a task measures
does not depend on who does it.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specforge_capture.prompts.evaluation import EvalPrompt, follow_up, load_eval_prompts
from specforge_launch.drafts import FoundDraft, find_draft, find_run, frozen_of
from specforge_launch.measure import measurement
from specforge_launch.resolve import Resolved, resolve
from specforge_launch.run_folder import RunFolder
from specforge_launch.target import transformers_target
from specforge_train.calibration import Calibration, calibrate
from specforge_train.counts import DecodeCounts, Decoded, Examined, PlainOutput
from specforge_train.decode import DecodingTarget, Drafter, evaluate
from specforge_train.registry import get_method

Progress = Callable[[int, int], None]
"""Called with the conversations that were decoded, over all temperatures, and those there are."""


@dataclass(frozen=True)
class Source:
    """What names a draft; the arguments of `find_draft`, small enough to send to another process."""

    source: str
    overrides: tuple[str, ...] = ()
    checkpoint: str | None = None
    target: str | None = None
    prompts: tuple[str, ...] = ()

    def find(self) -> FoundDraft:
        """The draft, and the configuration that it is measured under."""
        return find_draft(
            self.source,
            self.overrides,
            checkpoint=self.checkpoint,
            target=self.target,
            prompts=self.prompts,
        )


@dataclass(frozen=True)
class Task:
    """One prompt of a set at one temperature: so little is lost on Ctrl-C, and processes end together."""

    file: str
    temperature: float
    prompt: int
    """Its place in the set."""


@dataclass
class Measured:
    """What decoding some prompts gave."""

    counts: DecodeCounts
    examined: list[list[Examined]] = field(default_factory=list)
    """The judged proposals of each decoding."""

    def __iadd__(self, other: Measured) -> Measured:
        self.counts += other.counts
        self.examined += other.examined
        return self


@dataclass
class Session:
    """A draft and its target on a device, ready to decode."""

    resolved: Resolved
    target: DecodingTarget
    drafter: Drafter
    sets: dict[str, list[EvalPrompt]]

    @classmethod
    def open(cls, draft: FoundDraft, resolved: Resolved, sets: dict[str, list[EvalPrompt]]) -> Session:
        """Load target and draft on this machine's first device."""
        config, method = draft.config, get_method(draft.config.draft.method)
        on_gpu = config.deployment.trainer.device != "cpu" and torch.cuda.is_available()
        device = torch.device("cuda" if on_gpu else "cpu")
        dtype = torch.bfloat16 if on_gpu and config.training.dtype != "float32" else torch.float32
        target = transformers_target(resolved, device)
        frozen = frozen_of(resolved, dtype, device)
        model = method.build(draft.shape)
        model.load_state_dict(draft.state)
        drafter = method.drafter(model.to(device, dtype).eval(), frozen)
        session = cls(resolved, target, drafter, sets)
        if on_gpu:
            session.warm_up()
        return session

    def warm_up(self) -> None:
        """Decode a little: steps are recorded and kernels compiled before anything is timed."""
        prompt = next(prompt.input_ids for prompts in self.sets.values() for prompt in prompts)
        tokens = 4 * (self.drafter.block_size + 1)
        for temperature in self.resolved.config.evaluation.temperatures:
            evaluate(self.target, self.drafter, [prompt], tokens, (), temperature=temperature)

    def measure(self, task: Task) -> Measured:
        """Decode a task's prompt; an open chat goes on with the target's own answers."""
        settings, stop = self.resolved.config.evaluation, self.resolved.special.stop
        measured = Measured(DecodeCounts.zeros(self.drafter.block_size))

        def keep(counts: DecodeCounts, decoded: Decoded) -> None:
            measured.examined.append(decoded.examined())

        prompt: EvalPrompt | None = self.sets[task.file][task.prompt]
        while prompt is not None:
            own: dict[tuple[int, ...], PlainOutput] = {}
            measured.counts += evaluate(
                self.target,
                self.drafter,
                [prompt.input_ids],
                settings.max_new_tokens,
                stop,
                temperature=task.temperature,
                seed=settings.seed,
                on_prompt=keep,
                own_outputs=own,
            )
            (answer,) = own.values()
            text = self.resolved.renderer.decode([token for token in answer.tokens if token not in stop])
            prompt = follow_up(prompt, text, self.resolved.renderer)
        return measured


def prompt_sets(resolved: Resolved) -> dict[str, list[EvalPrompt]]:
    """File -> its prompts, for every file of `evaluation.prompts`."""
    settings = resolved.config.evaluation
    return {
        file: load_eval_prompts([file], resolved.renderer, settings.max_prompts) for file in settings.prompts
    }


def measure_draft(source: Source, workers: int = 1, progress: Progress = lambda d, n: None) -> dict[str, Any]:
    """Decode all prompt sets at all temperatures.

    Args:
        source: names the draft.
        workers: processes that decode side by side; their times are those of a shared device.
        progress: told after each task.

    Returns:
        Plain values: `sets`, a measurement each of a set at a temperature; the same at the top level over all
        sets at the first temperature; `calibration`; `conversations`, how many were decoded of how many:
        Ctrl-C ends the measurement with those that were.

    Raises:
        ValueError: if there is no such draft, or nothing to measure it with.
        KeyboardInterrupt: if nothing was decoded until Ctrl-C.
    """
    draft = source.find()
    settings = draft.config.evaluation
    resolved = resolve(draft.config)
    sets = prompt_sets(resolved)
    tasks = [
        Task(file, temperature, prompt)
        for temperature in settings.temperatures
        for file, prompts in sets.items()
        for prompt in range(len(prompts))
    ]
    block = draft.shape.config.block_size
    parts: dict[Task, Measured] = {}
    progress(0, len(tasks))
    if workers == 1:
        session = Session.open(draft, resolved, sets)
        carried_out = ((task, session.measure(task)) for task in tasks)
    else:
        carried_out = _side_by_side(tasks, source, workers)
    try:
        for task, measured in carried_out:
            parts[task] = measured
            progress(len(parts), len(tasks))
    except KeyboardInterrupt:
        if not parts:
            raise
    results: dict[tuple[float, str], Measured] = {}
    for task in tasks:  # whichever ended first: calibration halves the prompts by turns
        if task in parts:
            empty = Measured(DecodeCounts.zeros(block))
            so_far = results.setdefault((task.temperature, task.file), empty)
            so_far += parts[task]
    conversations = {"decoded": len(parts), "planned": len(tasks)}
    return {**_result(draft, results, workers), "conversations": conversations}


def _side_by_side(tasks: Sequence[Task], source: Source, workers: int) -> Iterator[tuple[Task, Measured]]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_open_session, initargs=(source,)) as pool:
        running = {pool.submit(_measure, task): task for task in tasks}
        try:
            for future in as_completed(running):
                yield running[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_session: Session | None = None  # of a worker process


def _open_session(source: Source) -> None:
    global _session
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C: the parent ends the pool
    torch.set_num_threads(1)
    draft = source.find()
    resolved = resolve(draft.config)
    _session = Session.open(draft, resolved, prompt_sets(resolved))


def _measure(task: Task) -> Measured:
    assert _session is not None
    return _session.measure(task)


def _result(draft: FoundDraft, results: dict[tuple[float, str], Measured], workers: int) -> dict[str, Any]:
    settings = draft.config.evaluation
    rows = [
        {"name": Path(file).stem, "temperature": temperature, **_row(measured.counts, temperature)}
        for (temperature, file), measured in results.items()
    ]
    first = next(iter(results))[0]
    pooled = [measured.counts for (temperature, _), measured in results.items() if temperature == first]
    overall = sum(pooled[1:], pooled[0])
    return {
        "draft": draft.name,
        "target": draft.config.target.path,
        "dummy_weights": draft.config.dummy_weights,
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        "workers": workers,
        "temperature": first,
        **_row(overall, first),
        "sets": rows,
        "calibration": _calibration(draft, results),
    }


def _row(counts: DecodeCounts, temperature: float) -> dict[str, Any]:
    row = {"prompts": counts.total, **measurement(counts)}
    if temperature:  # sampled outputs are equal in distribution, not one by one
        row |= {"lossless_identical": None, "lossless_total": None}
    return row


def _calibration(draft: FoundDraft, results: dict[tuple[float, str], Measured]) -> dict[str, Any] | None:
    """Judged at the temperature nearest to 1, under which acceptance is what the head was trained on."""
    if not draft.shape.config.confidence.enabled:
        return None
    nearest = min(draft.config.evaluation.temperatures, key=lambda temperature: abs(temperature - 1))
    examined = [e for (t, _), measured in results.items() if t == nearest for e in measured.examined]
    found: Calibration | None = calibrate(examined)
    if found is None:
        return None
    return {
        "decoding_temperature": nearest,
        **asdict(found),
        "bins": [row._asdict() for row in found.bins],
    }


def result_folder(source: str, overrides: Sequence[str]) -> Path | None:
    """`evaluation/` in the folder of the run that `source` names; None for a draft outside of any run."""
    if (Path(source) / "config.json").is_file():
        run = RunFolder(Path(source).parent)
        return run.path / "evaluation" if run.resolved.is_file() else None
    return Path(find_run(source, overrides).folder) / "evaluation"


def save_measurement(result: dict[str, Any], folder: Path) -> list[Path]:
    """Write `evaluation.json` and `evaluation.png` into `folder`; their paths."""
    from specforge_launch.evaluation_picture import draw

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "evaluation.json", folder / "evaluation.png"]
    paths[0].write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    draw(result, paths[1])
    return paths
