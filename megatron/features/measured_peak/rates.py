"""Peak FLOP rates of accelerators, from their makers' data sheets."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from megatron.util.files import read_sections

_PEAKS = read_sections(Path(__file__).with_name("peak_flops.txt"))["rates"]
"""FLOP/s by patterns of device names."""


def peak_flops_of(device_name: str) -> float | None:
    """Return the dense 16-bit FLOP/s of an accelerator, given the name that
    ``torch.cuda.get_device_name`` returns ("NVIDIA H100 80GB HBM3"), or None if it is not in the
    table."""
    for pattern, flops in _PEAKS.items():
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            return float(flops)
    return None


def peak_flops(device: torch.device) -> float | None:
    """Return the dense 16-bit FLOP/s of ``device`` from its maker's data sheet. Return None for
    CPUs and unknown accelerators, whose rates have to be measured."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))
