"""What this machine has, asked without torch."""

import os
import shutil
import subprocess

_MIB = 1 << 20


def gpu_memory() -> list[int]:
    """Bytes of each visible NVIDIA GPU; empty where there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    sizes = [int(line) * _MIB for line in answer.stdout.split()] if answer.returncode == 0 else []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return sizes if visible is None else sizes[: len(visible.split(","))]


def main_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
