"""Recipes as YAML with positions: plain data, and where each key of it was written.

Invariant: every key and list item of the data has an origin, the recipe's line or the override that set it.
Numbers with an exponent but no dot (`6e-4`) are floats as in YAML 1.2; dates stay text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]


class ConfigError(ValueError):
    """A run configuration that cannot be used; one line for each thing that is wrong with it."""


@dataclass(frozen=True, order=True)
class Origin:
    """Where a value was written; the order is that of the file, then of the overrides."""

    order: int
    label: str


@dataclass(frozen=True, order=True)
class Problem:
    """One thing that is wrong, with the place to change."""

    origin: Origin
    text: str

    def __str__(self) -> str:
        return f"{self.origin.label}: {self.text}"


@dataclass
class Document:
    """Data of a recipe and its overrides, the origin of every key, and the faults found while reading."""

    name: str
    data: Any = field(default_factory=dict)
    origins: dict[KeyPath, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin:
        """Origin of the innermost part of `path` that was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return Origin(0, f"{self.name}:1")


class _Loader(yaml.SafeLoader):
    """Safe YAML whose scalars are JSON's."""


_Loader.yaml_implicit_resolvers = {
    first: [entry for entry in entries if entry[0] != "tag:yaml.org,2002:timestamp"]
    for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def dotted(path: KeyPath) -> str:
    """`a.b[0]` for a key path."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _compose(text: str, label: Callable[[int], str]) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{label(line)}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{label(1)}: not valid YAML: {error}") from None


class _Reader:
    """Turns nodes into data and notes origins in a document."""

    def __init__(self, document: Document, origin: Callable[[yaml.Node], Origin]) -> None:
        self.document = document
        self.origin = origin
        self.scalars = _Loader("")
        self.open: set[int] = set()

    def read(self, node: yaml.Node, path: KeyPath) -> Any:
        """Data of a node that stands at `path`."""
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self.open:
            self._fault(
                self.document.origin(path),
                path,
                "an alias of its own parent; required: values without cycles",
            )
            return None
        self.open.add(id(node))
        data = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._list(node, path)
        self.open.remove(id(node))
        return data

    def _fault(self, origin: Origin, path: KeyPath, text: str) -> None:
        self.document.problems.append(Problem(origin, f"{dotted(path)}: {text}"))

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        try:
            data = self.scalars.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            found = getattr(error, "problem", None) or error
            self._fault(self.origin(node), path, f"{node.value!r} cannot be read: {found}")
            return None
        return data if data is None or isinstance(data, bool | int | float | str) else node.value

    def _list(self, node: yaml.Node, path: KeyPath) -> list[Any]:
        items = []
        for index, item in enumerate(node.value):
            self.document.origins[(*path, index)] = self.origin(item)
            items.append(self.read(item, (*path, index)))
        return items

    def _mapping(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._fault(self.origin(key), path, "a list or mapping as a key; required: a name")
                continue
            inner = (*path, key.value)
            if key.value in data:
                first = self.document.origins[inner].label
                self._fault(
                    self.origin(key), inner, f"the key is given twice, first at {first}; drop one of the two"
                )
                continue
            self.document.origins[inner] = self.origin(key)
            data[key.value] = self.read(value, inner)
        return data


def read_recipe(path: str | Path) -> Document:
    """Read a YAML file.

    Raises:
        ConfigError: if there is no such file, or it is no YAML mapping; the message holds file and line.
    """
    document = Document(str(path))
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; required: a recipe in YAML") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}; required: a recipe in YAML") from None
    node = _compose(text, lambda line: f"{path}:{line}")
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: found no mapping; required: `section: …` keys")

    def origin(node: yaml.Node) -> Origin:
        line = node.start_mark.line + 1
        return Origin(line, f"{path}:{line}")

    document.data = _Reader(document, origin).read(node, ())
    return document


def apply_override(document: Document, override: str, order: int) -> None:
    """Set one value of a document from `a.b.c=value`: the value is YAML, missing sections are made.

    Args:
        override: the text of the override.
        order: which override it is; later ones win.

    Raises:
        ConfigError: if the text has another form.
    """
    label = f"override '{override}'"
    dotted_key, equals, text = override.partition("=")
    path = tuple(dotted_key.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"{label}: required: section.key=value")
    origin = Origin(2**31 + order, label)
    node = _compose(text, lambda line: label)
    section = document.data
    for length, part in enumerate(path[:-1], start=1):
        if not isinstance(section.get(part), dict):
            section[part] = {}
            document.origins[path[:length]] = origin
        section = section[part]
    for stale in [known for known in document.origins if known[: len(path)] == path]:
        del document.origins[stale]
    document.origins[path] = origin
    section[path[-1]] = None if node is None else _Reader(document, lambda _: origin).read(node, path)
