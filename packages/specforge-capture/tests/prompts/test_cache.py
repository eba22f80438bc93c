import errno
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from specforge_capture.prompts.cache import PromptSet, cache_key, open_or_build
from specforge_capture.prompts.chat import ChatRenderer
from specforge_config.data import DataConfig

WriteRows = Callable[..., Path]
MakeConfig = Callable[..., DataConfig]

VOCABULARY = 320
# Children inherit the tokenizer; a fresh interpreter would import torch and transformers for seconds.
FORK = multiprocessing.get_context("fork")


def tokens(length: int) -> dict[str, list[int]]:
    return {"input_ids": [4 + i % 300 for i in range(length)], "loss_mask": [0] + [1] * (length - 1)}


def build(data: DataConfig, renderer: ChatRenderer, **options: Any) -> PromptSet:
    return open_or_build(data, renderer, vocab_size=VOCABULARY, **options)


def must_not_build(rows: int, share: float) -> None:
    raise AssertionError("built again")


@pytest.fixture
def data(write_rows: WriteRows, data_config: MakeConfig) -> DataConfig:
    return data_config(write_rows(*[tokens(2 + i % 50) for i in range(600)]))


def cache_files(data: DataConfig, suffix: str) -> list[Path]:
    return sorted(Path(data.cache_dir).glob(f"*.{suffix}"))


def test_rows_come_back_as_they_were(data: DataConfig, renderer: ChatRenderer) -> None:
    prompts = build(data, renderer)
    assert len(prompts) == 600
    for i in (0, 255, 256, 599):
        row = prompts.row(i, (2, 7))
        assert row.input_ids.tolist() == tokens(2 + i % 50)["input_ids"]
        assert row.loss_mask.tolist() == [bool(m) for m in tokens(2 + i % 50)["loss_mask"]]
        assert (row.sample_id, row.position) == (f"rows.jsonl:{i + 1}", (2, 7))
        assert not row.input_ids.flags.owndata
        assert not row.loss_mask.flags.owndata
    assert prompts.lengths().tolist() == [len(tokens(2 + i % 50)["input_ids"]) for i in range(600)]
    for i in (-1, 600):
        with pytest.raises(IndexError):
            prompts[i]


def test_the_second_opening_builds_nothing(data: DataConfig, renderer: ChatRenderer) -> None:
    first = build(data, renderer)
    second = build(data, renderer, progress=must_not_build)
    assert (second.fingerprint, second.report) == (first.fingerprint, first.report)


def test_every_setting_that_decides_the_samples_is_in_the_key(
    write_rows: WriteRows,
    data_config: MakeConfig,
    renderer: ChatRenderer,
    with_template: Callable[..., ChatRenderer],
) -> None:
    path = write_rows({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    data = data_config(path)
    assert renderer.template
    changed = [
        data.model_copy(update={name: value})
        for name, value in [
            ("max_length", 4095),
            ("supervise", "last_turn"),
            ("thinking", "drop"),
            ("overlong", "drop"),
            ("enable_thinking", False),
            ("format", "messages"),
        ]
    ]
    keys = [cache_key(config, renderer, VOCABULARY, None) for config in [data, *changed]]
    keys.append(cache_key(data, with_template(renderer.template + " "), VOCABULARY, None))
    keys.append(cache_key(data, renderer, VOCABULARY + 1, None))
    keys.append(cache_key(data, renderer, VOCABULARY, 3))
    path.write_text(path.read_text() + "\n")
    keys.append(cache_key(data, renderer, VOCABULARY, None))
    assert len(set(keys)) == len(keys)


def test_the_fingerprint_follows_the_samples(
    write_rows: WriteRows, data_config: MakeConfig, renderer: ChatRenderer
) -> None:
    one = build(data_config(write_rows(tokens(5))), renderer).fingerprint
    assert build(data_config(write_rows(tokens(5), name="same.jsonl")), renderer).fingerprint == one
    other = {**tokens(5), "loss_mask": [1] * 5}
    assert build(data_config(write_rows(other, name="other.jsonl")), renderer).fingerprint != one


@pytest.mark.parametrize(
    "damage",
    [
        lambda arrow: os.truncate(arrow, arrow.stat().st_size // 2),
        lambda arrow: arrow.write_bytes(b"x" * arrow.stat().st_size),
        lambda arrow: arrow.unlink(),
        lambda arrow: arrow.with_suffix(".json").unlink(),
        lambda arrow: arrow.with_suffix(".json").write_text('{"bytes": 1'),
        lambda arrow: arrow.with_suffix(".json").write_text("[]"),
    ],
    ids=["truncated", "overwritten", "gone", "no report", "half a report", "a foreign report"],
)
def test_a_damaged_cache_is_built_again(
    damage: Callable[[Path], None], data: DataConfig, renderer: ChatRenderer
) -> None:
    whole = build(data, renderer)
    damage(whole.path)
    assert build(data, renderer).fingerprint == whole.fingerprint
    build(data, renderer, progress=must_not_build)


def test_another_caches_file_under_this_name_is_built_again(
    data: DataConfig, renderer: ChatRenderer, write_rows: WriteRows, data_config: MakeConfig
) -> None:
    mine, other = (
        build(data, renderer),
        build(data_config(write_rows(tokens(9), name="other.jsonl")), renderer),
    )
    for suffix in (".arrow", ".json"):
        mine.path.with_suffix(suffix).write_bytes(other.path.with_suffix(suffix).read_bytes())
    assert build(data, renderer).fingerprint == mine.fingerprint


def test_nothing_usable_is_an_error_that_names_the_template(
    write_rows: WriteRows, data_config: MakeConfig, with_template: Callable[..., ChatRenderer]
) -> None:
    # The marker fires for a role of another format, so that no answer is marked.
    renderer = with_template(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'model' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}"
        "{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    data = data_config(write_rows(chat, chat))
    with pytest.raises(ValueError, match=r"none of the 2 rows .*template\.jinja: 2 × no supervised token"):
        build(data, renderer)
    assert not cache_files(data, "arrow")
    assert not cache_files(data, "tmp")


def test_strict_holds_for_a_cache_that_was_built_without(
    write_rows: WriteRows, data_config: MakeConfig, renderer: ChatRenderer
) -> None:
    path = write_rows(tokens(5), {"input_ids": [5], "loss_mask": [1]})
    assert len(build(data_config(path), renderer)) == 1
    with pytest.raises(ValueError, match=r"data\.strict: rows\.jsonl:2: 1 tokens"):
        build(data_config(path, strict=True), renderer)


def test_the_checksum_is_verified(
    write_rows: WriteRows, data_config: MakeConfig, renderer: ChatRenderer
) -> None:
    path = write_rows(tokens(5))
    with pytest.raises(
        ValueError, match=r"rows\.jsonl: its sha256 is [0-9a-f]{64}, but data\.sha256"
    ) as error:
        build(data_config(path, sha256="0" * 64), renderer)
    found = str(error.value).split("sha256 is ")[1][:64]
    assert len(build(data_config(path, sha256=found), renderer)) == 1


def test_a_missing_file_is_an_error(tmp_path: Path, data_config: MakeConfig, renderer: ChatRenderer) -> None:
    with pytest.raises(ValueError, match=r"data\.train: no file .*absent\.jsonl"):
        build(data_config(tmp_path / "absent.jsonl"), renderer)


def fill_the_disk(data: DataConfig, renderer: ChatRenderer, sender: Connection) -> None:
    # A file may not grow beyond 4 KB: the write fails as on a full disk.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        build(data, renderer)
    except ValueError as error:
        sender.send(str(error))


def test_a_full_disk_leaves_no_half_file(data: DataConfig, renderer: ChatRenderer) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=fill_the_disk, args=(data, renderer, sender))
    child.start()
    assert receiver.poll(30)
    message = receiver.recv()
    child.join(30)
    assert message.startswith("data.cache_dir: cannot write the prompt cache")
    assert os.strerror(errno.EFBIG) in message
    assert {path.suffix for path in Path(data.cache_dir).iterdir()} == {".lock"}
    assert len(build(data, renderer)) == 600


def test_an_unwritable_cache_folder_is_an_error(
    write_rows: WriteRows, data_config: MakeConfig, renderer: ChatRenderer
) -> None:
    data = data_config(write_rows(tokens(5)))
    Path(data.cache_dir).write_text("a file, no folder")
    with pytest.raises(ValueError, match=r"data\.cache_dir: cannot write"):
        build(data, renderer)


def build_once(data: DataConfig, renderer: ChatRenderer, sender: Connection) -> None:
    built = []
    prompts = build(data, renderer, progress=lambda rows, share: (built.append(rows), time.sleep(0.3)))
    sender.send((bool(built), prompts.fingerprint))


def test_of_several_processes_one_builds(data: DataConfig, renderer: ChatRenderer) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    children = [FORK.Process(target=build_once, args=(data, renderer, sender)) for _ in range(3)]
    for child in children:
        child.start()
    found = []
    for _ in children:
        assert receiver.poll(30)
        found.append(receiver.recv())
    for child in children:
        child.join(30)
    assert sorted(built for built, _ in found) == [False, False, True]
    assert len({fingerprint for _, fingerprint in found}) == 1


def build_forever(data: DataConfig, renderer: ChatRenderer, sender: Connection) -> None:
    def stall(rows: int, share: float) -> None:
        sender.send(rows)
        time.sleep(60)

    build(data, renderer, progress=stall)


@pytest.fixture
def stalled_builder(data: DataConfig, renderer: ChatRenderer) -> Any:
    """A process in the middle of a build."""
    receiver, sender = FORK.Pipe(duplex=False)
    child = FORK.Process(target=build_forever, args=(data, renderer, sender))
    child.start()
    assert receiver.poll(30)
    yield child
    child.kill()
    child.join(30)


def test_a_killed_builders_place_is_taken_over(
    data: DataConfig, renderer: ChatRenderer, stalled_builder: Any
) -> None:
    assert cache_files(data, "tmp")
    stalled_builder.kill()
    start = time.monotonic()
    assert len(build(data, renderer)) == 600
    assert time.monotonic() - start < 10
    assert not cache_files(data, "tmp")


def test_a_builder_without_progress_is_not_awaited_for_ever(
    data: DataConfig, renderer: ChatRenderer, stalled_builder: Any
) -> None:
    with pytest.raises(ValueError, match=f"process {stalled_builder.pid} on .* no progress for 1 s"):
        build(data, renderer, stall_seconds=1.0)


def rank(rank: int, rendezvous: str, data: DataConfig, renderer: ChatRenderer, sender: Connection) -> None:
    """Builds for longer than a collective may wait, on rank 0, inside a running process group."""
    torch.distributed.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=2)
    )
    if rank == 0:
        prompts = build(data, renderer, progress=lambda rows, share: time.sleep(5))
    else:
        while not cache_files(data, "lock"):
            time.sleep(0.05)
        prompts = build(data, renderer, progress=must_not_build)
    total = torch.tensor(len(prompts))
    torch.distributed.all_reduce(total)
    sender.send(int(total))
    torch.distributed.destroy_process_group()


def test_a_build_longer_than_the_collectives_timeout(
    data: DataConfig, renderer: ChatRenderer, tmp_path: Path
) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    rendezvous = f"file://{tmp_path / 'rendezvous'}"
    ranks = [FORK.Process(target=rank, args=(r, rendezvous, data, renderer, sender)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        for _ in ranks:
            assert receiver.poll(60)
            assert receiver.recv() == 1200
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]


def test_the_file_is_plain_arrow(data: DataConfig, renderer: ChatRenderer) -> None:
    prompts = build(data, renderer)
    table = pa.ipc.open_file(pa.memory_map(str(prompts.path))).read_all()
    assert table.num_rows == 600
    assert np.concatenate(table["input_ids"].to_numpy()).sum() == sum(
        sum(tokens(2 + i % 50)["input_ids"]) for i in range(600)
    )
    assert json.loads(prompts.path.with_suffix(".json").read_text())["report"]["kept"] == 600
