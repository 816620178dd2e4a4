#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Shows the timeline of each pipeline rank, without running it.

    python tools/schedule.py --pipeline-schedule interleaved --pipeline-model-parallel-size 4 \
        --num-virtual-stages-per-pipeline-rank 2 --micro-batches 8 --picture schedule.png

Prints a timeline per schedule and a table of bubbles, held activations and messages. Exits with 2
and the reason if the schedule does not exist for these numbers.
"""

import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from megatron.apps.planning.pipeline_times import (
    peak_activations,
    step_length,
    theory,
    waiting_ratio,
    waiting_share,
)
from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.config.layouts import complete_schedule
from megatron.parallel.pipeline_schedules import (
    INPUTS,
    SCHEDULES,
    WEIGHTS,
    Action,
    PipelineSchedule,
)
from megatron.parallel.timeline import Timeline, simulate, transfer_of
from megatron.util.errors import one_line
from megatron.util.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

FORWARD_COLOURS = ("#2f5f98", "#a9c8e8")
BACKWARD_COLOURS = ("#c9622c", "#f6cda4")
WEIGHT_COLOURS = ("#3f8f5b", "#bfe3cb")
"""Colours of the first and the last chunk; the colours between them are mixed."""
WEIGHT_LETTERS = "wx"
WAITING = "#ececec"
WIDTH = 13
"""Width of the picture in inches."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Pipeline: schedule, size, times, picture."""

    pipeline_schedule: str = option("all", choices=(*SCHEDULES, "all"))
    """The schedule; all compares every one that exists for these numbers."""
    pipeline_model_parallel_size: int = option(4)
    """Ranks of the pipeline."""
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None, derived="1 for 1f1b and zbh1, else 2; all gives it to interleaved alone"
    )
    """Stages per rank, also called chunks."""
    micro_batches: int = option(8)
    """Micro batches per step: global-batch-size / (micro-batch-size x data-parallel size)."""
    forward_time: float = option(1.0)
    """Time of the forward pass of one micro batch through all stages of a rank."""
    backward_time: float = option(2.0)
    """Time of the backward pass of one micro batch through the same stages."""
    weight_time: float | None = option(None, derived="half of the backward time")
    """Time within the backward pass of gradients of weights, which zbh1 and dualpipev_zb compute
    later."""
    transfer_time: float = option(0.0)
    """Time of a message from one rank to another."""
    picture: str | None = option(None)
    """Draw the timelines to this PNG file."""

    def check(self) -> None:
        for name in ("pipeline_model_parallel_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} {getattr(self, name)} must be at least 1")
        for name in ("forward_time", "backward_time", "transfer_time"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "transfer_time"):
                raise ConfigError(f"{flag(name)} {value:g} must be a positive number")
        weights, name = self.weight_time, flag("weight_time")
        if weights is not None and not 0 < weights < self.backward_time:
            raise ConfigError(
                f"{name} {weights:g} must be positive and less than {flag('backward_time')} "
                f"{self.backward_time:g}"
            )
        chunks, most = self.num_virtual_stages_per_pipeline_rank, len(ascii_lowercase)
        if chunks is not None and chunks > most:
            name = flag("num_virtual_stages_per_pipeline_rank")
            raise ConfigError(f"{name} {chunks}: the timeline has letters for {most} only")
        if self.picture is not None and Path(self.picture).suffix != ".png":
            raise ConfigError(f"--picture {self.picture} must end in .png")

    def chunks(self, name: str) -> int:
        """Chunks per rank of a schedule."""
        usual = complete_schedule(name, None)[1]
        if self.pipeline_schedule == "all" and name != "interleaved":
            return usual
        given = self.num_virtual_stages_per_pipeline_rank
        return usual if given is None else given

    def simulated(self, name: str) -> Timeline:
        """A schedule in time.

        Raises:
            ConfigError: it does not exist for these numbers.
        """
        ranks, micro_batches = self.pipeline_model_parallel_size, self.micro_batches
        schedule = PipelineSchedule(name, ranks, self.chunks(name), micro_batches)
        # Exact times: 0.1 is a tenth, and not the nearest binary fraction.
        times = (self.forward_time, self.backward_time, self.transfer_time)
        forward, backward, transfer = (Fraction(str(time)) for time in times)
        weights = None if self.weight_time is None else Fraction(str(self.weight_time))
        return simulate(schedule, forward, backward, transfer, weights)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def main(argv: Sequence[str] | None = None) -> None:
    (options,) = parse_configs((ScheduleConfig,), argv, description=__doc__)
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(f"schedule.py: error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def run(options: ScheduleConfig) -> None:
    options.check()
    timelines, refused = [], []
    if options.pipeline_schedule == "all":
        for name in SCHEDULES:
            try:
                timelines.append(options.simulated(name))
            except ConfigError as error:
                refused.append(f"{name}: not possible. {error}")
    else:
        timelines.append(options.simulated(options.pipeline_schedule))
    if options.picture is not None:
        draw(timelines, Path(options.picture))
    unit = unit_of(timelines)
    print(
        f"A column is {float(unit):g} of time. 3a: micro batch 3 forward through the rank's first"
    )
    print("stage; 3A: backward; 3b, 3B: through its second stage; '.': waiting.")
    if any(map(is_apart, timelines)):
        print("3w, 3x: gradients of weights, apart from 3A and 3B, which are those of inputs then.")
    width = shutil.get_terminal_size((240, 24)).columns
    for timeline in timelines:
        print(f"\n{heading(timeline)}")
        print("\n".join(text_of(timeline, unit, width)))
    print("\n" + "\n".join(table(timelines)))
    for line in refused:
        print(line)
    if options.picture is not None:
        print(f"picture: {options.picture}")


def heading(timeline: Timeline) -> str:
    schedule = timeline.schedule
    stages = f", {schedule.chunks} stages a rank" if schedule.chunks > 1 else ""
    return f"{schedule.name}{stages}"


def is_apart(timeline: Timeline) -> bool:
    """True if there are gradients of weights apart from backward passes."""
    return any(slot.action.part for slot in timeline.slots)


def by_formula(timeline: Timeline) -> Fraction | None:
    """The bubble ratio of the schedule's paper; None without one."""
    schedule = timeline.schedule
    takes = {slot.action.part: slot.end - slot.start for slot in timeline.slots}
    forward = next(slot.end - slot.start for slot in timeline.slots if not slot.action.backward)
    times = forward, takes.get(INPUTS, Fraction(1)), takes.get(WEIGHTS, Fraction(1))
    shape = schedule.name, schedule.ranks, schedule.chunks, schedule.micro_batches
    return theory(*shape, times)


def chunk_of(schedule: PipelineSchedule, action: Action) -> int:
    return schedule.stages_of(schedule.rank_of(action.stage)).index(action.stage)


def unit_of(timelines: Sequence[Timeline]) -> Fraction:
    """The time of a column: the common divisor of all durations, unless it is very small."""
    durations = {slot.end - slot.start for timeline in timelines for slot in timeline.slots}
    denominator = math.lcm(*(duration.denominator for duration in durations))
    divisor = Fraction(math.gcd(*(int(d * denominator) for d in durations)), denominator)
    shortest = min(durations)
    return divisor if divisor * 4 >= shortest else shortest


def text_of(timeline: Timeline, unit: Fraction, width: int) -> list[str]:
    """The timeline in letters, in as many blocks as the width requires."""
    schedule = timeline.schedule
    cell = len(str(schedule.micro_batches - 1)) + 2  # number, letter, space

    def column(time: Fraction) -> int:
        return math.floor(time / unit + Fraction(1, 2))

    columns = column(step_length(timeline))
    rows = [[".".ljust(cell)] * columns for _ in range(schedule.ranks)]
    for slot in timeline.slots:
        chunk = chunk_of(schedule, slot.action)
        letter = ascii_lowercase[chunk].upper() if slot.action.backward else ascii_lowercase[chunk]
        letter = WEIGHT_LETTERS[chunk] if slot.action.part == WEIGHTS else letter
        label = f"{slot.action.micro_batch}{letter}"
        start, end = column(slot.start), column(slot.end)
        bar = label.ljust((end - start) * cell - 1, "-") + " "
        rows[slot.rank][start:end] = [bar[i : i + cell] for i in range(0, len(bar), cell)]
    margin = len(f"rank {schedule.ranks - 1}  ")
    per_block = max(1, (width - margin) // cell)
    lines = []
    for first in range(0, columns, per_block):
        lines += [""] if first else []
        for rank, row in enumerate(rows):
            name = f"rank {rank}".ljust(margin)
            lines.append((name + "".join(row[first : first + per_block])).rstrip())
    return lines


def table(timelines: Sequence[Timeline]) -> list[str]:
    """Numbers of each schedule, with a legend."""
    head = (
        "schedule", "span", "bubble share", "bubble ratio", "by formula", "activations held",
        "messages sent",
    )  # fmt: skip
    rows = [head]
    for timeline in timelines:
        schedule, formula = timeline.schedule, by_formula(timeline)
        messages = [
            sum(transfer_of(schedule, action) is not None for action in schedule.actions(rank))
            for rank in range(schedule.ranks)
        ]
        rows.append(
            (
                heading(timeline),
                f"{float(step_length(timeline)):.4g}",
                f"{100 * float(waiting_share(timeline)):.1f}%",
                f"{float(waiting_ratio(timeline)):.3f}",
                "-" if formula is None else f"{float(formula):.3f}",
                per_rank(peak_activations(timeline)),
                per_rank(messages),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [
        *lines,
        "",
        "bubble share: waiting / all time; bubble ratio: waiting / working time, (p-1)/(v m)",
        "activations held: largest number of micro batches (through all stages of a rank), by rank",
    ]


def per_rank(values: Sequence[Fraction | int]) -> str:
    """A number for each rank, or their range when there are many."""
    if len(values) <= 8:
        return " ".join(f"{float(value):.4g}" for value in values)
    return f"{float(min(values)):.4g} to {float(max(values)):.4g}"


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draws the timelines under one another, on one scale of time."""
    # Figure rather than pyplot: no window system, no global state. Imported late: it takes seconds.
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [timeline.schedule.ranks for timeline in timelines]
    row_height = max(0.1, min(0.36, 24 / sum(rows)))
    figure = Figure(
        figsize=(WIDTH, row_height * sum(rows) + 0.6 * len(rows) + 0.8),
        dpi=150,
        layout="constrained",
    )
    panels = figure.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    span = float(max(step_length(timeline) for timeline in timelines))
    for axes, timeline in zip(panels, timelines, strict=True):
        draw_timeline(axes, timeline, span)
    panels[-1].set_xlabel("time")
    figure.legend(
        handles=legend(
            max(timeline.schedule.chunks for timeline in timelines), any(map(is_apart, timelines))
        ),
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    with replacing(path) as part:
        figure.savefig(part, format="png")


def draw_timeline(axes: "Axes", timeline: Timeline, span: float) -> None:
    """Ranks from top to bottom, a box per action, with its micro batch if there is space."""
    schedule = timeline.schedule
    ranks = schedule.ranks
    axes.barh(range(ranks), float(step_length(timeline)), height=0.86, color=WAITING, zorder=1)
    boxes: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for slot in timeline.slots:
        start, duration = float(slot.start), float(slot.end - slot.start)
        chunk = chunk_of(schedule, slot.action)
        colour, ink = colours(palette(slot.action), chunk, schedule.chunks)
        boxes[slot.rank, colour].append((start, duration))
        label = str(slot.action.micro_batch)
        if WIDTH * duration / span > 0.075 * len(label) + 0.03 and ranks <= 32:
            axes.text(
                start + duration / 2, slot.rank, label, color=ink, fontsize=8,
                ha="center", va="center_baseline", zorder=3,
            )  # fmt: skip
    shortest = min(duration for spans in boxes.values() for _, duration in spans)
    line = min(0.8, 0.05 * WIDTH * 72 * shortest / span)
    for (rank, colour), spans in boxes.items():
        axes.broken_barh(
            spans, (rank - 0.43, 0.86), color=colour, edgecolor="white", linewidth=line, zorder=2
        )
    formula = by_formula(timeline)
    theirs = "" if formula is None else f" ({float(formula):.3f} by formula)"
    axes.set_title(heading(timeline), loc="left", fontsize=11, fontweight="bold")
    axes.set_title(
        f"waiting {100 * float(waiting_share(timeline)):.1f}% of the time, "
        f"bubble ratio {float(waiting_ratio(timeline)):.3f}{theirs}",
        loc="right",
        fontsize=9.5,
        color="#444444",
    )
    axes.set_xlim(0, span)
    axes.set_ylim(ranks - 0.5, -0.5)
    every = max(1, ranks // 16)
    axes.set_yticks(range(0, ranks, every), [f"rank {r}" for r in range(0, ranks, every)])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def palette(action: Action) -> tuple[str, str]:
    if action.part == WEIGHTS:
        return WEIGHT_COLOURS
    return BACKWARD_COLOURS if action.backward else FORWARD_COLOURS


def colours(ends: tuple[str, str], chunk: int, chunks: int) -> tuple[str, str]:
    """Colour of a box, dark for the first chunk and light for the last, and of its text."""
    from matplotlib.colors import to_hex, to_rgb

    dark, light = map(to_rgb, ends)
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    red, green, blue = (d + share * (b - d) for d, b in zip(dark, light, strict=True))
    return to_hex((red, green, blue)), "white" if red + green + blue < 1.8 else "#222222"


def legend(chunks: int, apart: bool) -> list["Patch"]:
    from matplotlib.patches import Patch

    handles = []
    kinds = [("forward", FORWARD_COLOURS), ("backward", BACKWARD_COLOURS)]
    for what, ends in [*kinds, *[("weights", WEIGHT_COLOURS)] * apart]:
        for chunk in sorted({0, chunks - 1}):
            which = f", {'last' if chunk else 'first'} stage of the rank" if chunks > 1 else ""
            handles.append(Patch(color=colours(ends, chunk, chunks)[0], label=f"{what}{which}"))
    return [*handles, Patch(color=WAITING, label="waiting")]


if __name__ == "__main__":
    main()
