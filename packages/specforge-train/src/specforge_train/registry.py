"""The draft methods. A new one is a folder under `methods/` and a line here."""

from collections.abc import Mapping
from typing import Any

from specforge_train.methods.base import Method
from specforge_train.methods.dspark import DSpark

METHODS: tuple[Method, ...] = (DSpark(),)


def get_method(name: str) -> Method:
    """The method of `draft.method`.

    Raises:
        ValueError: for a method that is not built yet.
    """
    for method in METHODS:
        if method.name == name:
            return method
    raise ValueError(
        f"not implemented yet: draft.method {name!r}; there is {', '.join(m.name for m in METHODS)}"
    )


def method_of_config(config: Mapping[str, Any]) -> Method:
    """The method of an exported draft: speculators names it, for SGLang `architectures` stands for it.

    Raises:
        ValueError: if it is none of these.
    """
    named, architectures = config.get("speculators_model_type"), config.get("architectures") or []
    for method in METHODS:
        if named == method.name or (named is None and method.architecture in architectures):
            return method
    known = " or ".join(f"{m.architecture} (speculators: {m.name})" for m in METHODS)
    raise ValueError(f"config.json is of {named or architectures}, required {known}")
