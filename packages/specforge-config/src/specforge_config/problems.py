"""What is wrong with a configuration, told with its place, what was found, what is required and the nearest
known key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError

from specforge_config.base import Config
from specforge_config.run import RunConfig
from specforge_config.source import Document, KeyPath, Problem, dotted

_WORDS = {"array": "list", "object": "mapping", "dictionary": "mapping"}


def problems_of(error: ValidationError, document: Document) -> list[Problem]:
    """The problems of a failed validation, each once."""
    found: dict[KeyPath, list[dict[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        found.setdefault(_key_path(detail, document.data), []).append(dict(detail))
    return [problem for path, details in found.items() for problem in _tell(path, details, document)]


def _key_path(detail: Any, data: Any) -> KeyPath:
    """Keys of an error's location, without what the data does not hold, as tags of unions."""
    path: KeyPath = ()
    for part in detail["loc"]:
        if isinstance(data, dict | list) and (
            part in data if isinstance(data, dict) else isinstance(part, int)
        ):
            path, data = (*path, part), data[part]
    return (*path, detail["loc"][-1]) if detail["type"] == "missing" else path


def _tell(path: KeyPath, details: list[dict[str, Any]], document: Document) -> Iterator[Problem]:
    """Problems of one key; the members of an untagged union that all refuse the value make one."""
    first = details[0]
    kind, context = first["type"], first.get("ctx", {})
    if kind == "value_error":
        for detail in details:
            for line in str(detail["ctx"]["error"]).splitlines():
                yield _cross_field(path, line, document)
        return
    if kind == "extra_forbidden":
        text = _unknown(path, document.data)
    elif kind == "missing":
        text = "missing; it is required"
    elif kind == "union_tag_invalid":
        path = (*path, _tag(_models_at(path, document.data)))
        text = _required(context["tag"], context["expected_tags"])
    else:
        text = _required(first["input"], " or ".join(_requirement(detail["msg"]) for detail in details))
    yield Problem(document.origin(path), f"{dotted(path)}: {text}")


def _requirement(message: str) -> str:
    text = re.sub("^Input should be (?:an? )?(?:valid )?", "", message)
    return re.sub(r"\b(array|object|dictionary)\b", lambda word: _WORDS[word[0]], text[:1].lower() + text[1:])


def _required(found: object, required: str) -> str:
    shown = "null" if found is None else str(found).lower() if isinstance(found, bool) else repr(found)
    near = difflib.get_close_matches(str(found), re.findall(r"'([^']+)'", required), n=1)
    return f"{shown} found; required: {required}" + (f"; did you mean '{near[0]}'?" if near else "")


def _cross_field(path: KeyPath, line: str, document: Document) -> Problem:
    """A validator's own text, at the line of the first written key that it names, or of its section."""
    names = re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", line)
    keys = [(*path, *name.split(".")) for name in names if path or "." in name]
    written = next((key for key in keys if key in document.origins), path)
    return Problem(document.origin(written), f"{dotted(path)}: {line}" if path else line)


def _models(annotation: Any) -> list[type[Config]]:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _tag(models: list[type[Config]]) -> str:
    """The field that tells the members of a union apart: a literal with one value."""
    fields = models[0].model_fields
    literals = {
        name: get_args(f.annotation) for name, f in fields.items() if get_origin(f.annotation) is Literal
    }
    return next(name for name, values in literals.items() if len(values) == 1)


def _variant(models: list[type[Config]], data: Any) -> type[Config]:
    """The member of a union that the data's tag names; the first one is the default."""
    if len(models) == 1:
        return models[0]
    tag = _tag(models)
    wanted = data.get(tag) if isinstance(data, dict) else None
    return next((m for m in models if get_args(m.model_fields[tag].annotation) == (wanted,)), models[0])


def _models_at(path: KeyPath, data: Any) -> list[type[Config]]:
    """The models that may stand at `path`, given the tags of the sections on the way."""
    models: list[type[Config]] = [RunConfig]
    for part in path:
        model = _variant(models, data)
        data = data.get(part) if isinstance(data, dict) else None
        models = _models(model.model_fields[part].annotation) if part in model.model_fields else []
        if not models:
            break
    return models


def _known_keys(model: type[Config], data: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all keys below a model, for the variants that the data names."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if models := _models(field.annotation):
            inner = data.get(name) if isinstance(data, dict) else None
            yield from _known_keys(_variant(models, inner), inner, f"{prefix}{name}.")


def _unknown(path: KeyPath, data: Any) -> str:
    """What to write instead of an unknown key: a near key of its section, or the same key of another one."""
    *place, key = path
    section, models = data, _models_at(tuple(place), data)
    for part in place:
        section = section[part]
    model = _variant(models, section)
    owners = [m for m in models if key in m.model_fields]
    if owners:
        tag = _tag(models)
        where = dotted((*place, tag))
        return (
            f"unknown key with {where} {_value(model, tag)}; it belongs to {where} {_value(owners[0], tag)}"
        )
    near = difflib.get_close_matches(str(key), list(model.model_fields), n=1, cutoff=0.7)
    names = [dotted((*place, name)) for name in near]
    names = names or [name for name in _known_keys(RunConfig, data) if name.rpartition(".")[2] == key][:2]
    if names:
        return "unknown key; did you mean " + " or ".join(f"'{name}'" for name in names) + "?"
    return f"unknown key; required: one of {', '.join(model.model_fields)}"


def _value(model: type[Config], tag: str) -> str:
    return get_args(model.model_fields[tag].annotation)[0]
