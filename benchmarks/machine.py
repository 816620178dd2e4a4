"""Description of the machine of a result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "numpy")


def machine() -> dict[str, Any]:
    """The device and versions."""
    cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "cuda": torch.version.cuda if cuda else None,
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "python": platform.python_version(),
    } | {name: _version(name) for name in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
