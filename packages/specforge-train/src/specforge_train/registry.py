"""The draft methods. A new one is a folder under `methods/` and a line here."""

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


def method_of_architecture(architectures: list[str]) -> Method:
    """The method that serves under one of `architectures`, the field of a `config.json`.

    Raises:
        ValueError: if none does.
    """
    for method in METHODS:
        if method.architecture in architectures:
            return method
    known = ", ".join(m.architecture for m in METHODS)
    raise ValueError(f"config.json names the architectures {architectures}, required one of {known}")
