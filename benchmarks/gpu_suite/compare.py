"""Comparison of two variants' training: their losses step by step, and their first gradients.

All variants of a shape start from the same weights and read the same samples, so that they differ
by rounding alone, and a variant that does not has no speed worth a place in the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from contestants.registry import FLOOR
from contestants.setting import Setting

from gpu_suite.results import Found, failure

BANDS = {"narrow": (0.01, 0.05), "wide": (0.03, 0.15)}
"""Largest relative difference of a loss, and of the first gradients' norm: of 16 bits, and of what
rounds more (fp8, weights or moments in fewer bits)."""
ROUNDS_MORE = ("fp8-format", "main-params-dtype=bf16", "dtype=int8")


def band(contestant: str) -> str:
    """The name of a contestant's band."""
    return "wide" if any(flag in contestant for flag in ROUNDS_MORE) else "narrow"


def outside(found: Found, reference: Found) -> str | None:
    """Say how a variant leaves the band around the reference; None if it does not."""
    of_loss, of_norm = BANDS[band(found["cell"]["contestant"])]
    for step, (loss, expected) in enumerate(
        zip(found["losses"], reference["losses"], strict=False), 1
    ):
        if loss is not None and expected is not None and _apart(loss, expected, of_loss):
            return f"loss at step {step} is {loss:.4f}, not {expected:.4f} ± {of_loss:.0%}"
    norm, expected = (each["grad_norms"][0] for each in (found, reference))
    if norm is not None and expected is not None and _apart(norm, expected, of_norm):
        return f"first gradients' norm is {norm:.4g}, not {expected:.4g} ± {of_norm:.0%}"
    return None


def _apart(value: float, expected: float, share: float) -> bool:
    """NaN is apart from everything."""
    return not (math.isfinite(value) and abs(value - expected) <= share * abs(expected))


def departures(results: Mapping[str, Found]) -> dict[str, str]:
    """List how each cell departs from the reference of its shape, length and step: the first in the
    order of ``results`` in the narrow band, or else the first."""
    groups: dict[tuple[str, int, int], list[str]] = {}
    for name, found in results.items():
        if found["cell"]["shape"] and failure(found) is None and _has_losses(found):
            setting = Setting(**found["setting"])
            key = (found["cell"]["shape"], setting.seq_length, setting.tokens_per_step)
            groups.setdefault(key, []).append(name)
    found_out = {}
    for names in groups.values():
        narrow = [n for n in names if band(results[n]["cell"]["contestant"]) == "narrow"]
        reference = results[(narrow or names)[0]]
        for name in names:
            why = outside(results[name], reference)
            if why is not None:
                found_out[name] = why
    return found_out


def _has_losses(found: Found) -> bool:
    return found["cell"]["contestant"] != FLOOR and bool(found["losses"])
