"""Strict unified diffs: read, apply, reverse.

For files whose exact bytes are known (their hashes are checked before and after): a hunk fits its line and
every line of its context, or nothing is applied. No fuzz, no offsets, only changes of existing text files:
what `git diff` writes for them and `git apply` accepts. Needs neither git nor patch on the user's machine.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """One change: `old` lines from line `old_start` (1-based) become the `new` lines from `new_start`."""

    old_start: int
    new_start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class FileDiff:
    """The hunks of one file, in the order of its lines. `path` is relative and has no `a/` or `b/`."""

    path: str
    hunks: list[Hunk] = field(default_factory=list)


def read_diff(text: str) -> list[FileDiff]:
    """The changes that `text` holds; lines before the first `diff --git` are its header.

    Raises ValueError where the diff creates, deletes or renames a file, or is cut short.
    """
    files: list[FileDiff] = []
    lines = iter(text.removesuffix("\n").split("\n"))
    for line in lines:
        if line.startswith("diff --git "):
            files.append(_file(line, lines))
        elif match := _HUNK.match(line):
            if not files:
                raise ValueError(f"no file is named before the hunk {line!r}")
            files[-1].hunks.append(_hunk(match, lines))
        elif files:
            raise ValueError(f"found {line!r} where a hunk or a file has to start")
    if not files:
        raise ValueError("holds no `diff --git` line")
    return files


def _file(names: str, lines: Iterator[str]) -> FileDiff:
    old = next(lines, "")
    if old.startswith("index "):
        old = next(lines, "")
    new = next(lines, "")
    path = old.removeprefix("--- a/")
    if (names, old, new) != (f"diff --git a/{path} b/{path}", f"--- a/{path}", f"+++ b/{path}"):
        raise ValueError(f"{names!r} is not followed by the names of one file that stays in place")
    return FileDiff(path)


def _hunk(header: re.Match[str], lines: Iterator[str]) -> Hunk:
    old_start, old_count, new_start, new_count = (int(n) if n else 1 for n in header.groups())
    old: list[str] = []
    new: list[str] = []
    for line in lines:
        sign, rest = line[:1], line[1:]
        if sign not in (" ", "-", "+"):
            raise ValueError(f"found {line!r} in the hunk {header[0]!r}")
        if sign != "+":
            old.append(rest)
        if sign != "-":
            new.append(rest)
        if len(old) >= old_count and len(new) >= new_count:
            break
    if (len(old), len(new)) != (old_count, new_count):
        raise ValueError(f"the hunk {header[0]!r} is cut short")
    return Hunk(old_start, new_start, tuple(old), tuple(new))


def apply_hunks(content: bytes, hunks: list[Hunk]) -> bytes:
    """The UTF-8 text `content` with `hunks` applied. Raises ValueError for the first that does not fit."""
    lines = content.decode().split("\n")
    result: list[str] = []
    done = 0
    for hunk in hunks:
        start, end = hunk.old_start - 1, hunk.old_start - 1 + len(hunk.old)
        if start < done or tuple(lines[start:end]) != hunk.old:
            raise ValueError(f"the hunk of line {hunk.old_start} does not fit")
        result += lines[done:start]
        if len(result) != hunk.new_start - 1:
            raise ValueError(f"the hunk of line {hunk.old_start} does not lead to line {hunk.new_start}")
        result += hunk.new
        done = end
    return "\n".join(result + lines[done:]).encode()


def reversed_hunks(hunks: list[Hunk]) -> list[Hunk]:
    """The hunks that undo `hunks`."""
    return [Hunk(hunk.new_start, hunk.old_start, hunk.new, hunk.old) for hunk in hunks]
