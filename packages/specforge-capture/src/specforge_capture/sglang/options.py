"""What a capture server is told: its command line, and how it reaches the processes that capture.

SGLang starts its schedulers as processes of its own and knows nothing of these options, so the parsed
settings travel in an environment variable. It is written from the command line alone: what it held before is
dropped.

Pure: imports neither SGLang nor torch.
"""

import argparse
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import PositiveInt, ValidationError

from specforge_config.base import Config
from specforge_config.features import CaptureSpec
from specforge_config.store import StoreConfig, parse_store
from specforge_config.target import target_revision

VARIABLE = "SPECFORGE_CAPTURE_SERVER"
"""Environment variable that carries `CaptureSettings`."""

REFUSED = {
    "pp_size": 1,
    "dp_size": 1,
    "attn_cp_size": 1,
    "tokenizer_worker_num": 1,
    "enable_dp_attention": False,
    "enable_two_batch_overlap": False,
    "enable_pdmux": False,
    "grpc_mode": False,
    "use_ray": False,
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "disaggregation_mode": "null",
    "moe_a2a_backend": "none",
}
"""SGLang's argument -> the one value under which a prefill shows a rank all rows, in a process of ours."""


class CaptureSettings(Config):
    """The parsed options."""

    spec: CaptureSpec
    """The contract that features follow."""
    store: StoreConfig
    """Where features go."""
    ring_bytes: PositiveInt = 256 << 20
    """Pinned memory through which features leave the device."""
    pending_bytes: PositiveInt = 2 << 30
    """Features on the device that may wait for the ring; the scheduler waits when there are more."""

    def publish(self) -> None:
        """Hand the settings to the processes that this one starts."""
        os.environ[VARIABLE] = self.model_dump_json()

    @classmethod
    def published(cls) -> "CaptureSettings | None":
        """The settings that this process was started with; None where nothing is captured."""
        text = os.environ.get(VARIABLE)
        return None if text is None else cls.model_validate_json(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to SGLang's."""
    group = parser.add_argument_group("feature capture (specforge-capture)")
    group.add_argument(
        "--enable-spec-capture", action="store_true", help="Serve captures of hidden states too."
    )
    group.add_argument("--spec-capture-spec", metavar="JSON", help="The capture contract (CaptureSpec).")
    group.add_argument(
        "--spec-capture-store", metavar="JSON", help='The store, such as {"kind": "files", "folder": …}.'
    )
    group.add_argument("--spec-capture-method", help="Draft method; must be the contract's.")
    group.add_argument(
        "--spec-capture-layer-ids",
        type=lambda text: [int(layer) for layer in text.split(",")],
        help="Post-layer ids, 0-based, separated by commas; must be the contract's.",
    )
    for name, meaning in (
        ("ring", "Pinned memory through which features leave the device."),
        ("pending", "Features that may wait for the ring before prefills do."),
    ):
        default = CaptureSettings.model_fields[f"{name}_bytes"].default
        help = f"{meaning} Default: {default}."
        group.add_argument(f"--spec-capture-{name}-bytes", type=int, default=default, help=help)


def read_arguments(arguments: argparse.Namespace) -> CaptureSettings | None:
    """The settings of a command line; None where capture is not enabled.

    Raises:
        ValueError: naming what is missing or wrong.
    """
    if not arguments.enable_spec_capture:
        return None
    for name in ("spec", "store"):
        if getattr(arguments, f"spec_capture_{name}") is None:
            raise ValueError(f"--enable-spec-capture is set; required besides: --spec-capture-{name} JSON")
    try:
        spec = CaptureSpec.model_validate_json(arguments.spec_capture_spec)
        settings = CaptureSettings(
            spec=spec,
            store=parse_store(arguments.spec_capture_store),
            ring_bytes=arguments.spec_capture_ring_bytes,
            pending_bytes=arguments.spec_capture_pending_bytes,
        )
    except ValidationError as error:
        rows = (f"{'.'.join(map(str, row['loc'])) or 'the text'}: {row['msg']}" for row in error.errors())
        raise ValueError("--spec-capture-…: " + "; ".join(rows)) from None
    given = {"method": arguments.spec_capture_method, "layer-ids": arguments.spec_capture_layer_ids}
    for name, value in given.items():
        wanted = json.loads(spec.model_dump_json())[name.replace("-", "_")]
        if value is not None and value != wanted:
            raise ValueError(
                f"--spec-capture-{name} is {value}; required: {wanted}, as in --spec-capture-spec"
            )
    return settings


def require_servable(server_args: Any, spec: CaptureSpec) -> None:
    """Check that a server with SGLang's `server_args` can capture under `spec`.

    Raises:
        ValueError: a line for each argument that it cannot have.
    """
    if faults := [*_faults(server_args, spec)]:
        raise ValueError("capture is not possible:\n" + "\n".join(faults))


def _faults(server_args: Any, spec: CaptureSpec) -> Iterator[str]:
    for name, wanted in REFUSED.items():
        found = getattr(server_args, name)
        if found not in (wanted, None):
            yield f"{name} is {found!r}; required: {wanted!r}, as others are not implemented for captures yet"
    if os.environ.get("SGLANG_RUST_SERVER", "0").lower() not in ("", "0", "false"):
        yield "SGLANG_RUST_SERVER is set; required: unset, as that server does not carry answers of plugins"
    folder = Path(server_args.model_path)
    # A revision that is not of this form was named by the run's user, and says nothing of a folder.
    if folder.is_dir() and re.fullmatch("[0-9a-f]{16}", spec.target_revision):
        found = target_revision(folder)
        if found != spec.target_revision:
            yield (
                f"model_path {folder} holds revision {found}; required: {spec.target_revision}, the "
                "contract's target_revision"
            )
