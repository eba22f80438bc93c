"""The base of every configuration model: unknown keys are errors, values are frozen, docstrings are the
schema's texts."""

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    GetJsonSchemaHandler,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


class Config(BaseModel):
    """A frozen section of a run configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def _faults(self) -> Iterator[str]:
        """What is wrong across the fields of this section, a line each; names start at the section."""
        yield from ()

    @model_validator(mode="after")
    def _no_faults(self) -> Self:
        if found := list(self._faults()):
            raise ValueError("\n".join(found))
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # Pydantic's own use_attribute_docstrings reads sources at every import, for half of its time.
        made = handler.resolve_ref_schema(handler(schema))
        texts = {
            name: text for base in reversed(cls.__mro__) for name, text in _attribute_docstrings(base).items()
        }
        for name, field in made.get("properties", {}).items():
            field["description"] = texts[name]
        return made


@cache
def _attribute_docstrings(model: type) -> dict[str, str]:
    """The string under each annotated attribute of a configuration model; empty for other classes."""
    if not issubclass(model, Config) or model is Config:
        return {}
    definition = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


def tagged(key: str, default: str) -> Discriminator:
    """Chooses the member of a union by its field `key`; a section without it is the default member."""

    def tag(value: Any) -> str:
        found = value.get(key, default) if isinstance(value, dict) else getattr(value, key, default)
        return str(found)

    return Discriminator(tag)


def _find_input(value: str, info: ValidationInfo) -> str:
    """Resolve a relative path beside the recipe first, then in the working directory."""
    base, path = (info.context or {}).get("base"), Path(value).expanduser()
    if base is None or path.is_absolute():
        return str(path)
    beside = Path(base) / path
    return str(beside if beside.exists() or not path.exists() else path.absolute())


def unlike_default(section: Config) -> list[str]:
    """Names of the fields that have another value than their default; required fields always count."""
    fields = type(section).model_fields
    return [
        name
        for name, field in fields.items()
        if getattr(section, name) != field.get_default(call_default_factory=True)
    ]


def repeated(values: tuple[str, ...]) -> list[str]:
    """Values that occur more than once."""
    return [value for value, count in Counter(values).items() if count > 1]


def host_and_port(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host stands in brackets, which are dropped.

    Raises:
        ValueError: saying what is required, for anything else.
    """
    found = re.fullmatch(r"([^\s:\[\]]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", address)
    if found is None or not 0 < int(found[2]) < 65536:
        raise ValueError(f"{address!r}; required: host:port with a port of 1 to 65535")
    return found[1].strip("[]"), int(found[2])


def refused_addresses(addresses: tuple[str, ...]) -> Iterator[str]:
    """What `host_and_port` says of each address that it refuses."""
    for address in addresses:
        try:
            host_and_port(address)
        except ValueError as error:
            yield str(error)


def _one_is_a_list(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


InputPath = Annotated[str, AfterValidator(_find_input)]
"""A file or folder that the run reads; relative paths are looked up beside the recipe, then in the working
directory."""

InputPaths = Annotated[
    tuple[InputPath, ...],
    BeforeValidator(_one_is_a_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
"""Input paths; one alone need not be a list."""
