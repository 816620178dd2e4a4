"""Formatting of a breakdown as text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.apps.profiling.breakdown import Breakdown
from megatron.apps.profiling.categories import CATEGORIES, COMMUNICATION, HOST, IDLE, PHASES

MIB = 2**20


def breakdown_text(found: Breakdown, top: int = 12) -> str:
    """Return the tables of categories by phase, of the ``top`` operators and GEMMs, of collectives
    and of waits."""
    unit = "GPU time" if found.on_device else "time of the training thread"
    steps = f"{found.steps} step{'s' if found.steps > 1 else ''}"
    how = "in the mean" if found.kind == "mean" else "when each operator is at its fastest"
    parts = [
        f"{steps} of rank {found.rank}: {found.step / 1e3:.2f} ms a step {how} ({unit})",
        _categories(found),
        _operators(found, top),
        _gemms(found, top),
        _collectives(found),
        _waits(found),
    ]
    return "\n\n".join(part for part in parts if part)


def _categories(found: Breakdown) -> str:
    rows = [["", *PHASES, "sum", "share"]]
    for category in CATEGORIES:
        total = found.of_category(category)
        if total or category == (IDLE if found.on_device else HOST):
            cells = [found.cells.get((category, phase), 0.0) for phase in PHASES]
            rows.append([category, *map(_ms, cells), _ms(total), _share(total, found.step)])
    sums = [found.of_phase(phase) for phase in PHASES]
    rows.append(["step", *map(_ms, sums), _ms(found.step), _share(found.step, found.step)])
    rows.append(["share", *(_share(each, found.step) for each in sums), "", ""])
    return aligned(rows)


def _operators(found: Breakdown, top: int) -> str:
    title = "kernel" if found.on_device else "operator, its own time"
    rows = [[title, "ms", "share", "calls", "MiB allocated"]]
    for each in found.operators[:top]:
        name = each.name if len(each.name) <= 60 else f"{each.name[:57]}..."
        share, memory = _share(each.time, found.step), f"{each.amount / MIB:.1f}"
        rows.append([name, _ms(each.time), share, f"{each.calls:.0f}", memory])
    return aligned([row[:-1] for row in rows] if found.on_device else rows)


def _gemms(found: Breakdown, top: int) -> str:
    if not found.gemms:
        return ""
    peak = found.about.get("matmul_peak_flops")

    def rates(flops: float, time: float) -> list[str]:
        rate = flops / time * 1e6 if time else 0.0
        share = _share(rate, peak) if peak else ""
        return [_ms(time), f"{flops / 1e9:.2f}", f"{rate / 1e12:.4g}", share]

    rows = [["matrix product [m, k] x [k, n]", "phase", "calls", "ms", "GFLOP", "TFLOP/s",
             "of peak"]]  # fmt: skip
    for each in found.gemms[:top]:
        row = [each.name, each.phase, f"{each.calls:.0f}", *rates(each.amount, each.time)]
        rows.append(row)
    calls, time, flops = map(sum, zip(*(gemm[2:] for gemm in found.gemms), strict=True))
    rows.append(["all products with weights", "", f"{calls:.0f}", *rates(flops, time)])
    text = aligned(rows, left=2)
    if peak:
        rate = flops / found.step * 1e6
        text += (
            f"\npeak: {peak / 1e12:.4g} TFLOP/s, the highest rate of square matrix products, "
            f"measured before the first of these steps; the whole step reaches "
            f"{rate / 1e12:.4g}, {_share(rate, peak)} of it"
        )
    return text


def _collectives(found: Breakdown) -> str:
    if not found.collectives:
        return ""
    rows = [["collective, mean step", "calls", "ms running", "MiB"]]
    for each in found.collectives:
        size = f"{each.amount / MIB:.1f}" if each.amount else ""
        rows.append([each.name, f"{each.calls:.0f}", _ms(each.time), size])
    exposed = found.of_category(COMMUNICATION)
    return (
        f"{aligned(rows)}\n"
        f"next to other work {_ms(found.hidden)} ms, alone {_ms(exposed)} ms of a step"
    )


def _waits(found: Breakdown) -> str:
    if not found.waits:
        return "the CPU reads no tensor's value"
    rows = [["the CPU waits or reads a value", "phase", "calls", "ms"]]
    rows += [[w.name, w.phase, f"{w.calls:.1f}", _ms(w.time)] for w in found.waits]
    return aligned(rows, left=2)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return an aligned table. The first ``left`` columns are left-aligned, all others
    right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
