"""Starts runs for the tests of this folder, which goes on the path for `launched`."""

import signal
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launched import SHORT, Launched

from specforge_launch import cli

CHATS = Path(__file__).parents[1] / "recipes" / "tiny-chats" / "train.jsonl"
ROWS = 50  # twelve steps of four an epoch, and a tail of two that fills none


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The modules that start runs come first, so that two workers end together."""
    items.sort(key=lambda item: item.path.name not in ("test_resilience.py", "test_colocated.py"))


@pytest.fixture(scope="module")
def train_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first rows of the shipped chats."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    with CHATS.open() as file:
        path.write_text("".join(islice(file, ROWS)))
    return path


@pytest.fixture(scope="module")
def launch(train_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Launched]]:
    """Starts a shortened quickstart in a folder, by name; what still runs at the end is killed."""
    place, started = tmp_path_factory.mktemp("runs"), []

    def start(name: str, *arguments: str) -> Launched:
        run = Launched(place / name, [*SHORT, f"data.train={train_file}", *arguments], place)
        started.append(run)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.send_signal(signal.SIGKILL)
            run.process.communicate(timeout=30)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints, run in this process."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["specforge-launch", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert not stop.value.code
        return capsys.readouterr().out

    return run
