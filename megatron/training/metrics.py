"""Evaluations of a run, and the peak rates of its devices."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron.config import RunConfig
from megatron.config.features import taking_part
from megatron.util.files import read_sections


class Reported(Protocol):
    """An evaluation, as the console and the writers take it."""

    @property
    def iteration(self) -> int:
        """Steps done before it."""

    @property
    def kind(self) -> str:
        """The writers' name for its values."""

    def line(self) -> str:
        """The console line."""

    def row(self) -> dict[str, float | None]:
        """The values by name, for writers."""


@dataclass(frozen=True)
class Evaluation:
    """Losses on held-out data after ``iteration`` steps: means over micro batches and ranks, by the
    family's names. ``name`` is that of the data set, "valid" or "test" where there is only one.
    ``no_perplexity`` are those that are no cross entropies; ``loss`` is the minimised number, where
    it is none of them."""

    iteration: int
    losses: Mapping[str, float]
    name: str = "valid"
    test: bool = False
    no_perplexity: frozenset[str] = frozenset()
    loss: float | None = None

    @property
    def kind(self) -> str:
        """The writers' name for these values."""
        kind = "test" if self.test else "validation"
        return kind if self.name in ("valid", "test") else f"{kind} {self.name}"

    def line(self) -> str:
        """The console line, with the key texts of Megatron that people's scripts look for."""
        where = f"iteration {self.iteration}" + (" on test set" if self.test else "")
        where += "" if self.name in ("valid", "test") else f" on {self.name}"
        ppl = self._perplexities()
        values = "".join(
            f"{name} value: {loss:.6E} | "
            + (f"{name} PPL: {ppl[name]:.6E} | " if name in ppl else "")
            for name, loss in self.losses.items()
        )
        return f" validation loss at {where} | {values}".rstrip()

    def row(self) -> dict[str, float | None]:
        """The values by name, for writers; a single loss is ``loss``."""
        ppl = self._perplexities()
        if len(self.losses) == 1:
            ((name, loss),) = self.losses.items()
            return {"loss": loss, **({"perplexity": ppl[name]} if ppl else {})}
        total = {} if self.loss is None else {"loss": self.loss}
        return {**total, **self.losses, **{f"{name} PPL": value for name, value in ppl.items()}}

    def _perplexities(self) -> dict[str, float]:
        with_one = (name for name in self.losses if name not in self.no_perplexity)
        return {name: perplexity(self.losses[name]) for name in with_one}


def perplexity(loss: float) -> float:
    """exp(loss), with a loss of 20 at most, as in Megatron, so that it does not overflow."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))


_PEAKS = read_sections(Path(__file__).with_name("peak_flops.txt"))["rates"]
"""FLOP/s of devices by patterns of their names."""


def peak_flops_of(device_name: str) -> float | None:
    """Dense 16-bit FLOP/s of an accelerator by the name that ``torch.cuda.get_device_name`` gives
    it ("NVIDIA H100 80GB HBM3"), None if it is not in the table."""
    for pattern, flops in _PEAKS.items():
        if re.search(rf"\b(?:{pattern})\b", device_name, re.IGNORECASE):
            return float(flops)
    return None


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit FLOP/s of ``device`` from its maker's data sheet; None for CPUs and unknown
    accelerators, whose rates are to be measured."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def run_peak(config: RunConfig, device: torch.device) -> tuple[float | None, str]:
    """Peak rate of a run's device in FLOP/s, None where it is not known, and its source in
    words."""
    if config.logging.peak_tflops is not None:
        return config.logging.peak_tflops * 1e12, "--peak-tflops"
    if device.type != "cpu":
        return peak_flops(device), "data sheet"
    measured = (feature.peak_of_processor(config) for feature in taking_part())
    return next((each for each in measured if each is not None), (None, "not known"))
