"""Our strict unified diffs beside git's."""

import random
import subprocess
from pathlib import Path

import pytest

from specforge_capture.unified_diff import apply_hunks, read_diff, reversed_hunks

HEADER = "Say what and why\n\n- a list is no hunk\n\n"
STOCK = "".join(f"line {number}\n" for number in range(1, 21))


def git_diff(folder: Path, old: str, new: str) -> str:
    """`git diff` of the file pkg/a.py between two commits' worth of text."""
    path = folder / "pkg/a.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(old)
    for command in (["init", "-q"], ["add", "pkg/a.py"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    path.write_text(new)
    return subprocess.run(
        ["git", "diff", "--no-color", "--no-ext-diff"], cwd=folder, check=True, capture_output=True, text=True
    ).stdout


def edited(text: str, seed: int) -> str:
    """`text` with lines removed, changed and added; among them empty ones, and some with odd separators."""
    chance = random.Random(seed)
    lines = []
    for line in text.splitlines(keepends=True):
        kind = chance.choice(["keep"] * 12 + ["drop", "change", "add"])
        if kind != "drop":
            lines.append(f"\tnew é {seed}\x0c\u2028\n" if kind == "change" else line)
        if kind == "add":
            lines += ["\n", "--- not a file\n", "@@ -1 +1 @@\n"]
    return "".join(lines) + "the last\n"


@pytest.mark.parametrize("seed", range(6))
def test_applies_and_reverses_what_git_writes(tmp_path: Path, seed: int) -> None:
    new = edited(STOCK, seed)
    (file,) = read_diff(HEADER + git_diff(tmp_path, STOCK, new))
    assert file.path == "pkg/a.py"
    assert apply_hunks(STOCK.encode(), file.hunks) == new.encode()
    assert apply_hunks(new.encode(), reversed_hunks(file.hunks)) == STOCK.encode()


def test_git_takes_the_same_form(tmp_path: Path) -> None:
    """The `index` line, which names objects of a repository, is left out of our patches."""
    new = edited(STOCK, 3)
    diff = HEADER + without_index(git_diff(tmp_path, STOCK, new))
    (tmp_path / "change.patch").write_text(diff)
    (tmp_path / "pkg/a.py").write_text(STOCK)
    subprocess.run(["git", "apply", "change.patch"], cwd=tmp_path, check=True)
    assert (tmp_path / "pkg/a.py").read_text() == new
    assert apply_hunks(STOCK.encode(), read_diff(diff)[0].hunks) == new.encode()


def without_index(diff: str) -> str:
    return "".join(line for line in diff.splitlines(keepends=True) if not line.startswith("index "))


@pytest.mark.parametrize("change", ["line 9", "line 6"], ids=["replaced", "context"])
def test_a_hunk_that_does_not_fit_is_refused(tmp_path: Path, change: str) -> None:
    (file,) = read_diff(without_index(git_diff(tmp_path, STOCK, STOCK.replace("line 9\n", "line nine\n"))))
    with pytest.raises(ValueError, match="the hunk of line 6 does not fit"):
        apply_hunks(STOCK.replace(change, "other").encode(), file.hunks)
    with pytest.raises(ValueError, match="does not fit"):
        apply_hunks(b"one line more\n" + STOCK.encode(), file.hunks)  # no offsets


NAMES = "diff --git a/x b/x\n--- a/x\n+++ b/x\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no diff at all\n", "holds no `diff --git` line"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n", "stays in place"),
        ("diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n", "stays in place"),
        (NAMES + "@@ -1,2 +1,2 @@\n one\n-two\n", "is cut short"),
        (NAMES + "@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n", "No newline"),
        ("@@ -1 +1 @@\n-a\n+b\n", "no file is named"),
    ],
)  # fmt: skip
def test_other_diffs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_diff(text)
