"""The supported SGLang versions, each behind one small module of the same interface."""

from importlib import import_module, metadata
from typing import Any, Protocol, cast

from specforge_capture.sglang.islands import Place

SUPPORTED = {"0.5.14": "v0_5_14", "0.5.18": "v0_5_18", "0.5.23": "v0_5_23"}
"""Version -> module beside this one."""


class Adapter(Protocol):
    """What differs between versions. SGLang's own objects pass through as they are."""

    def make_runner(self, server_args: Any, place: Place) -> Any:
        """Build groups and load weights: a `ModelRunner` without pools. Runs inside `virtual_world`."""
        ...

    def set_whole_prompt(self, request: Any, length: int) -> None:
        """Tell a `Req` that its prefill covers all of its `length` tokens."""
        ...

    def make_forward_batch(self, batch: Any, runner: Any) -> Any:
        """The `ForwardBatch` of a prepared `ScheduleBatch`, capturing all positions."""
        ...

    def syncs_over_dp(self, server_args: Any) -> bool:
        """Whether a prefill would wait for other data-parallel ranks."""
        ...


def installed_version() -> str:
    """The version of SGLang.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise ValueError(
            "target.backend is sglang, but SGLang is not installed; required: specforge-capture[sglang], or "
            "target.backend hf"
        ) from None


def adapter_module(version: str) -> str:
    """The full name of the module for a version.

    Raises:
        ValueError: if the version is not supported.
    """
    if version not in SUPPORTED:
        raise ValueError(f"SGLang {version} is installed; required: one of {', '.join(SUPPORTED)}")
    return f"{__package__}.{SUPPORTED[version]}"


def load_adapter() -> Adapter:
    """The adapter for the installed version.

    Raises:
        ValueError: if SGLang is not installed, or in a version that is not supported.
    """
    return cast(Adapter, import_module(adapter_module(installed_version())))
