import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specforge_capture.sglang.options import (
    REFUSED,
    VARIABLE,
    CaptureSettings,
    add_arguments,
    read_arguments,
    require_servable,
)
from specforge_config.features import CaptureSpec
from specforge_config.target import target_revision

STORE = '{"kind": "files", "folder": "features"}'


def read(*line: str) -> CaptureSettings | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_arguments(parser.parse_args(line))


def enabled(spec: CaptureSpec, *line: str) -> CaptureSettings | None:
    contract = ("--spec-capture-spec", spec.model_dump_json(), "--spec-capture-store", STORE)
    return read("--enable-spec-capture", *contract, *line)


def server_args(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**REFUSED, "model_path": "an/unknown-target", **changed})


def test_nothing_is_captured_unless_it_is_enabled(spec: CaptureSpec) -> None:
    assert read() is None
    assert read("--spec-capture-spec", spec.model_dump_json(), "--spec-capture-store", STORE) is None


def test_options_become_settings(spec: CaptureSpec) -> None:
    agreeing = ("--spec-capture-method", "dspark", "--spec-capture-layer-ids", "0,2,3")
    settings = enabled(spec, *agreeing, "--spec-capture-ring-bytes", "4096")
    assert settings is not None
    assert (settings.spec, settings.store.kind, settings.ring_bytes) == (spec, "files", 4096)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ((), "--spec-capture-spec JSON"),
        (("--spec-capture-spec", "{}"), "--spec-capture-store JSON"),
        (("--spec-capture-spec", "{}", "--spec-capture-store", STORE), "layer_ids: Field required"),
        (("--spec-capture-spec", "{", "--spec-capture-store", STORE), "the text: Invalid JSON"),
    ],
)
def test_what_is_missing_is_named(line: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read("--enable-spec-capture", *line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("--spec-capture-method", "eagle3"), "--spec-capture-method is eagle3; required: dspark"),
        (("--spec-capture-layer-ids", "0,3,2"), r"layer-ids is \[0, 3, 2\]; required: \[0, 2, 3\]"),
        (("--spec-capture-store", '{"kind": "files"}'), "store settings .*folder"),
        (("--spec-capture-pending-bytes", "0"), "pending_bytes: Input should be greater than 0"),
    ],
)
def test_what_contradicts_the_contract_is_refused(
    spec: CaptureSpec, line: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        enabled(spec, *line)


def test_settings_reach_a_child_through_the_environment(
    spec: CaptureSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert CaptureSettings.published() is None
    monkeypatch.setenv(VARIABLE, "")  # so that it is restored afterwards
    settings = enabled(spec)
    assert settings is not None
    settings.publish()
    assert CaptureSettings.published() == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pp_size", 2),
        ("dp_size", 2),
        ("enable_dp_attention", True),
        ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "prefill"),
        ("moe_a2a_backend", "deepep"),
        ("tokenizer_worker_num", 2),
    ],
)
def test_servers_that_cannot_capture_are_refused(spec: CaptureSpec, name: str, value: Any) -> None:
    require_servable(server_args(), spec)
    with pytest.raises(ValueError, match=rf"{name} is {value!r}; required: {REFUSED[name]!r}"):
        require_servable(server_args(**{name: value}), spec)


def test_all_that_is_wrong_is_told_at_once(spec: CaptureSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
    with pytest.raises(ValueError, match=r"pp_size.*\n.*use_ray.*\n.*SGLANG_RUST_SERVER"):
        require_servable(server_args(pp_size=2, use_ray=True), spec)


def test_another_target_than_the_contracts_is_refused(spec: CaptureSpec, qwen3_folder: Path) -> None:
    found = target_revision(qwen3_folder)
    of_it = spec.model_copy(update={"target_revision": found})
    require_servable(server_args(model_path=str(qwen3_folder)), of_it)
    require_servable(server_args(model_path=str(qwen3_folder)), spec)  # a revision that a user named
    other = spec.model_copy(update={"target_revision": "0123456789abcdef"})
    with pytest.raises(ValueError, match=f"holds revision {found}; required: 0123456789abcdef"):
        require_servable(server_args(model_path=str(qwen3_folder)), other)


def test_the_entry_point_imports_no_torch() -> None:
    program = "import sys, specforge_capture.sglang.plugin; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
