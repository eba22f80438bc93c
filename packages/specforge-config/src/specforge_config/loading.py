"""Recipes to run configurations and back: YAML, dotted overrides, errors with their lines, the JSON schema.

Nothing but the file and the overrides is read: environment variables change no setting.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specforge_config.problems import problems_of
from specforge_config.run import RunConfig
from specforge_config.source import ConfigError, Document, apply_override, read_recipe

__all__ = ["ConfigError", "dump_run", "json_schema", "load_run"]


def load_run(path: str | Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe and check it as a whole.

    Types are strict: `true` is no number and `"5"` no integer.

    Args:
        path: YAML file; relative input paths in it are looked up beside it, then in the working directory.
            None for a run of overrides alone.
        overrides: `section.key=value` each, the value as YAML; later ones win.

    Raises:
        ConfigError: all problems, one a line: `file:line: section.key: what was found; what is required`.
    """
    document = Document("the command line") if path is None else read_recipe(path)
    base = Path.cwd() if path is None else Path(path).absolute().parent
    for order, override in enumerate(overrides):
        apply_override(document, override, order)
    problems = list(document.problems)
    try:
        # JSON mode is what lets strict validation take lists for tuples.
        config = RunConfig.model_validate_json(json.dumps(document.data), strict=True, context={"base": base})
    except ValidationError as error:
        problems += problems_of(error, document)
    if problems:
        raise ConfigError("\n".join(map(str, sorted(problems))))
    return config


def dump_run(config: RunConfig) -> str:
    """YAML of every setting, defaults included, from which `load_run` makes an equal configuration."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def json_schema() -> dict[str, Any]:
    """JSON schema (2020-12) of a recipe, each key described, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}
