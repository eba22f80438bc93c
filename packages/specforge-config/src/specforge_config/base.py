"""The base of every configuration model: unknown keys are errors, values are frozen, docstrings are the schema's texts."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo


class Config(BaseModel):
    """A frozen section of a run configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


def _beside_recipe(value: str, info: ValidationInfo) -> str:
    """Resolve a relative path beside the recipe first, then in the working directory."""
    base = (info.context or {}).get("base")
    if base is None or Path(value).is_absolute():
        return value
    beside = Path(base) / value
    return str(beside) if beside.exists() or not Path(value).exists() else str(Path(value).absolute())


InputPath = Annotated[str, AfterValidator(_beside_recipe)]
"""A file or folder that the run reads; relative paths are looked up beside the recipe, then in the working directory."""
