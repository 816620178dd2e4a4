"""A split as text."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.profiling.categories import CATEGORIES, HOST, IDLE
from megatron.profiling.scopes import PHASES
from megatron.profiling.split import Split

MIB = 2**20


def split_text(split: Split, top: int = 12) -> str:
    """The split in full: categories by phase, operators, collectives, products, waits.

    Args:
        split: what to show.
        top: how many operators and shapes are listed.
    """
    unit = "GPU time" if split.on_device else "time of the training thread"
    steps = f"{split.steps} step{'s' if split.steps > 1 else ''}"
    how = "in the mean" if split.kind == "mean" else "when each operator is at its fastest"
    parts = [
        f"{steps} of rank {split.rank}: {split.step / 1e3:.2f} ms a step {how} ({unit})",
        _categories(split),
        _operators(split, top),
        _products(split, top),
        _communication(split),
        _waits(split),
    ]
    return "\n\n".join(part for part in parts if part)


def _categories(split: Split) -> str:
    rows = [["", *PHASES, "sum", "share"]]
    for category in CATEGORIES:
        total = split.of_category(category)
        if total or category == (IDLE if split.on_device else HOST):
            cells = [split.cells.get((category, phase), 0.0) for phase in PHASES]
            rows.append([category, *map(_ms, cells), _ms(total), _share(total, split.step)])
    sums = [split.of_phase(phase) for phase in PHASES]
    rows.append(["step", *map(_ms, sums), _ms(split.step), _share(split.step, split.step)])
    rows.append(["share", *(_share(each, split.step) for each in sums), "", ""])
    return _aligned(rows)


def _operators(split: Split, top: int) -> str:
    named = "kernel" if split.on_device else "operator, its own time"
    rows = [[named, "ms", "share", "calls", *([] if split.on_device else ["MiB allocated"])]]
    for each in split.operators[:top]:
        row = [_short(each.name), _ms(each.time), _share(each.time, split.step)]
        row.append(f"{each.calls:.0f}")
        rows.append(row if split.on_device else [*row, f"{each.allocated / MIB:.1f}"])
    return _aligned(rows)


def _products(split: Split, top: int) -> str:
    if not split.products:
        return ""
    flops = sum(product.flops for product in split.products)
    time = sum(product.time for product in split.products)
    peak = split.about.get("matmul_peak_flops")
    rows = [["product [m, k] x [k, n]", "phase", "calls", "ms", "GFLOP", "TFLOP/s", "of peak"]]
    for each in split.products[:top]:
        shape = " x ".join(map(str, each.shape))
        rows.append([shape, each.phase, f"{each.calls:.0f}", *_rates(each.flops, each.time, peak)])
    calls = sum(product.calls for product in split.products)
    rows.append(["all products with weights", "", f"{calls:.0f}", *_rates(flops, time, peak)])
    lines = [_aligned(rows, left=2)]
    if peak:
        lines.append(
            f"peak: {peak / 1e12:.4g} TFLOP/s, the best that square products reached before the "
            f"first of these steps; the whole step reaches {flops / split.step * 1e6 / 1e12:.4g}, "
            f"{_share(flops / split.step * 1e6, peak)} of it"
        )
    return "\n".join(lines)


def _rates(flops: float, time: float, peak: float | None) -> list[str]:
    rate = flops / time * 1e6 if time else 0.0
    share = _share(rate, peak) if peak else ""
    return [_ms(time), f"{flops / 1e9:.2f}", f"{rate / 1e12:.4g}", share]


def _communication(split: Split) -> str:
    if not split.collectives:
        return ""
    rows = [["collective, mean step", "calls", "ms running", "MiB"]]
    for each in split.collectives:
        size = f"{each.size / MIB:.1f}" if each.size else ""
        rows.append([each.name, f"{each.calls:.0f}", _ms(each.time), size])
    exposed = split.of_category("communication")
    return (
        _aligned(rows)
        + f"\nbeside other work {_ms(split.hidden)} ms, alone {_ms(exposed)} ms of a step"
    )


def _waits(split: Split) -> str:
    if not split.waits:
        return "the host reads no value of a tensor"
    rows = [["the host waits or reads a value", "phase", "calls", "ms"]]
    rows += [[w.name, w.phase, f"{w.calls:.1f}", _ms(w.time)] for w in split.waits]
    return _aligned(rows, left=2)


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _short(name: str, width: int = 60) -> str:
    return name if len(name) <= width else f"{name[: width - 3]}..."


def _aligned(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Columns of equal width; the first ``left`` ones to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
