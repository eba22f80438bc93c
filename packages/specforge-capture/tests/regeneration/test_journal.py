import json
from pathlib import Path

import pytest

from specforge_capture.regeneration.journal import (
    file_sha256,
    finished_manifest,
    manifest_path,
    open_journal,
    partial_path,
)

SETTINGS = {"seed": 1, "prompts": [["a", "b"]]}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "data" / "answers.jsonl"


def test_rows_come_in_the_order_of_the_prompts(output: Path) -> None:
    with open_journal(output, SETTINGS) as journal:
        for index in (2, 0, 1):
            journal.add(index, {"id": index} if index else {"id": index, "reason": "no user turn"})
        manifest = journal.finish({"rows": 3})
    assert [json.loads(line)["id"] for line in output.read_text().splitlines()] == [1, 2]
    assert manifest == {"settings": SETTINGS, "rows": 3, "sha256": file_sha256(output)}
    assert json.loads(manifest_path(output).read_text()) == manifest
    assert {path.name for path in output.parent.iterdir()} == {output.name, manifest_path(output).name}
    assert finished_manifest(output, SETTINGS) == manifest


def test_a_kill_loses_at_most_the_row_being_written(output: Path) -> None:
    with open_journal(output, SETTINGS) as journal:
        journal.add(0, {"id": "ä\u2028\x85"})
        journal.add(4, {"id": "b"})
    path = partial_path(output)
    path.write_bytes(path.read_bytes()[:-4])
    with open_journal(output, SETTINGS) as journal:
        assert journal.rows == {0: {"id": "ä\u2028\x85"}}
        journal.add(1, {"id": "c"})
    with open_journal(output, SETTINGS) as journal:
        assert journal.rows == {0: {"id": "ä\u2028\x85"}, 1: {"id": "c"}}


def test_a_kill_before_the_first_line_is_whole_begins_anew(output: Path) -> None:
    output.parent.mkdir()
    partial_path(output).write_text('{"settings": {"se')
    with open_journal(output, SETTINGS) as journal:
        assert journal.rows == {}
    with open_journal(output, SETTINGS) as journal:
        assert journal.rows == {}


def test_a_start_that_answered_nothing_binds_no_settings(output: Path) -> None:
    with open_journal(output, SETTINGS):
        pass
    with open_journal(output, SETTINGS | {"seed": 2}) as journal:
        journal.add(0, {"id": "a"})
    with open_journal(output, SETTINGS | {"seed": 2}) as journal:
        assert journal.rows == {0: {"id": "a"}}


def test_other_settings_are_refused_by_name(output: Path) -> None:
    with open_journal(output, SETTINGS) as journal:
        journal.add(0, {"id": "a"})
    with (
        pytest.raises(ValueError, match=r"made under other settings:\n  seed: 1 there, 2 now\n"),
        open_journal(output, SETTINGS | {"seed": 2}),
    ):
        pass
    with open_journal(output, SETTINGS) as journal:
        journal.finish({})
    with pytest.raises(ValueError, match="seed: 1 there, 2 now"):
        finished_manifest(output, SETTINGS | {"seed": 2})


def test_what_lies_there_is_never_overwritten(output: Path) -> None:
    output.parent.mkdir()
    output.write_text("mine\n")
    with pytest.raises(ValueError, match=r"exists without answers\.jsonl\.manifest\.json"):
        finished_manifest(output, SETTINGS)


def test_a_changed_output_is_noticed(output: Path) -> None:
    with open_journal(output, SETTINGS) as journal:
        journal.add(0, {"id": "a"})
        journal.finish({})
    output.write_text(output.read_text() + "\n")
    with pytest.raises(ValueError, match="it was changed"):
        finished_manifest(output, SETTINGS)


def test_damage_in_the_middle_is_an_error(output: Path) -> None:
    with open_journal(output, SETTINGS) as journal:
        journal.add(0, {"id": "a"})
    with partial_path(output).open("a") as file:
        file.write("not json\n")
    with (
        pytest.raises(ValueError, match=r"answers\.jsonl\.partial is damaged"),
        open_journal(output, SETTINGS),
    ):
        pass


def test_one_process_at_a_time_writes(output: Path) -> None:
    with (
        open_journal(output, SETTINGS),
        pytest.raises(ValueError, match="is being written by another process"),
        open_journal(output, SETTINGS),
    ):
        pass
