"""Checks of the machine that a run stands on: each is ok, or says what to do."""

import os
import platform
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from specforge_config.deployment import cores
from specforge_launch.machine import main_memory
from specforge_launch.show import bytes_text

_GIB = 1 << 30
_PACKAGES = ("config", "kernels", "capture", "train", "launch")


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    name: str
    level: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""


def examine(folder: str = ".") -> list[Finding]:
    """Examine this machine for runs that write below `folder`."""
    return [
        _python(),
        _packages(),
        *_torch(),
        _machine(),
        _space("disk", Path(folder), 2 * _GIB, "free some, or set output_dir to another disk"),
        _space(
            "/dev/shm",
            Path("/dev/shm"),
            _GIB // 2,
            "start the container with a larger --shm-size (NCCL needs it)",
        ),
        _port(),
        *_caches(folder),
    ]


def _python() -> Finding:
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Finding:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(f"specforge-{name}")
        except PackageNotFoundError:
            return Finding(
                "packages", "fail", f"specforge-{name} is missing", f"pip install specforge-{name}"
            )
    if len(set(versions.values())) > 1:
        found = ", ".join(f"{name} {number}" for name, number in versions.items())
        return Finding("packages", "warn", found, "install the same release of each")
    return Finding(
        "packages", "ok", f"specforge {versions['launch']}, transformers {_version('transformers')}"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _torch() -> list[Finding]:
    if find_spec("torch") is None:
        return [Finding("torch", "fail", "missing", "pip install 'torch>=2.11,<2.15'")]
    import torch

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    good = (2, 11) <= release < (2, 15)
    advice = "" if good else "required: torch 2.11 to 2.14"
    findings = [Finding("torch", "ok" if good else "fail", torch.__version__, advice)]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            busy = free < 0.9 * total
            found = (
                f"{gpu.name}, compute {gpu.major}.{gpu.minor}, {bytes_text(free)} of {bytes_text(total)} free"
            )
            advice = "another process uses it: choose GPUs with CUDA_VISIBLE_DEVICES" if busy else ""
            findings.append(Finding(f"gpu {index}", "warn" if busy else "ok", found, advice))
    elif shutil.which("nvidia-smi"):
        found = f"the driver is there, but torch (built for CUDA {torch.version.cuda}) finds no GPU"
        findings.append(Finding("gpu", "warn", found, "compare nvidia-smi's CUDA version with torch's"))
    else:
        findings.append(Finding("gpu", "ok", "none; runs compute on the CPU"))
    return findings


def _machine() -> Finding:
    return Finding(
        "machine", "ok", f"{cores()} cores, {bytes_text(main_memory())} of memory, {platform.system()}"
    )


def _space(name: str, path: Path, required: int, advice: str) -> Finding:
    while not path.exists():
        path = path.parent
    free = shutil.disk_usage(path).free
    if free >= required:
        return Finding(name, "ok", f"{bytes_text(free)} free at {path.resolve()}")
    return Finding(
        name, "warn", f"{bytes_text(free)} free at {path.resolve()}, {bytes_text(required)} wanted", advice
    )


def _port() -> Finding:
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.settimeout(5)
            client.connect(server.getsockname())
    except OSError as error:
        return Finding(
            "ports", "fail", f"no connection over 127.0.0.1: {error}", "bring the loopback interface up"
        )
    return Finding("ports", "ok", "ranks can meet on 127.0.0.1")


def _caches(folder: str) -> list[Finding]:
    home = Path.home() / ".cache"
    places = {
        "outputs": (
            Path(folder),
            "change to a folder you may write to, or set output_dir and data.cache_dir",
        ),
        "compiled kernels": (
            Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())),
            "set TORCHINDUCTOR_CACHE_DIR",
        ),
        "triton": (Path(os.environ.get("TRITON_CACHE_DIR", home)), "set TRITON_CACHE_DIR"),
    }
    return [_writable(name, path, advice) for name, (path, advice) in places.items()]


def _writable(name: str, path: Path, advice: str) -> Finding:
    existing = path
    while not existing.exists():
        existing = existing.parent
    if os.access(existing, os.W_OK):
        return Finding(f"{name} folder", "ok", str(path.resolve()))
    return Finding(f"{name} folder", "fail", f"{path.resolve()} is not writable", advice)
