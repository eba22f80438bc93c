"""Lets SGLang be imported where there is no triton and no torchvision built for this torch.

A `.pth` file imports this module in every interpreter of the environment. Nothing heavy is loaded until
somebody asks for `triton` or `torchvision`.

- **triton**: SGLang imports it everywhere, to define kernels that a CPU never launches. The stand-in has
  every name: a kernel stays the plain function it was, so that launching it (`kernel[grid](...)`) raises.
  torch itself must go on finding no triton, or its compiler would use it.
- **torchvision**: the index has it for CUDA, where a CPU torch cannot load its operators; importing it needs
  the schemas of two of them.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Placeholder:
    """A triton value or decorator that nothing computes with."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Decorate: give a function back; with options, give a decorator."""
        return args[0] if len(args) == 1 and callable(args[0]) and not options else self

    def __getattr__(self, name: str) -> "_Placeholder":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<{self._name}, which this environment lacks>"


class _NoDriver:
    @property
    def active(self) -> Any:
        raise RuntimeError("triton has no active driver")


class _Triton(ModuleType):
    """`triton` or a module under it: names are classes where they are written like one, else placeholders."""

    __version__ = "0.0.0"
    driver = _NoDriver()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name in _MODULES:
            return import_module(full)
        value = type(name, (), {"__init__": _accept_anything}) if _is_class(name) else _Placeholder(full)
        setattr(self, name, value)
        return value

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


_MODULES = ("backends", "compiler", "language", "runtime", "testing", "tools")
"""Modules that `import triton` brings along."""


def _is_class(name: str) -> bool:
    return name[0].isupper() or name in ("constexpr", "dtype", "tensor")


def _accept_anything(self: object, *args: object, **options: object) -> None:
    pass


class _TritonLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Triton(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Finder(MetaPathFinder):
    """Finds the stand-in for triton, and prepares torch before torchvision is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if name == "torchvision":
            _define_torchvision_operators()
        if top != "triton" or (name == top and (_torch_asks() or PathFinder.find_spec(name))):
            return None
        if name == top:
            import torch.utils._triton

            torch.utils._triton.has_triton_package()  # torch remembers that there is none
        return ModuleSpec(name, _TritonLoader(), is_package=True)


def _torch_asks() -> bool:
    """Whether the import under way was written in torch."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch"


_LIBRARIES: list[Any] = []
"""Operator schemas live as long as the library that they were defined through."""


def _define_torchvision_operators() -> None:
    import torch

    if torch.version.cuda is not None or _LIBRARIES:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


sys.meta_path.insert(0, _Finder())
