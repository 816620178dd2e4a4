#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Compares runs by their TensorBoard events: a table for each, one picture, the differences.

    python tools/plot_runs.py --tb-dir z1_uni_ckpt --tb-event-key "lm loss" --plot-name loss.png
    python tools/plot_runs.py --experts runs/a/metrics.jsonl --plot-name experts.png
    python tools/plot_runs.py --metrics small=runs/a/metrics.jsonl large=runs/b/metrics.jsonl

Writes, into the current folder, uc_out_<layout>.csv (index, step, value) of every run below
--tb-dir that has the scalar, and the picture; prints how far the runs are apart at common steps.
With --metrics it draws instead what the runs evaluated, validation losses and tasks, over consumed
tokens; with --experts how evenly tokens were spread over the experts of each layer. Exits with 2
and the reason if no run has it.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.apps.pictures.expert_loads import plot_loads
from megatron.apps.pictures.run_curves import (
    RunCurve,
    draw_panels,
    plot_curves,
    read_curves,
    read_evaluations,
    read_tables,
    write_csv,
)
from megatron.config import parse_configs
from megatron.config.flags import option
from megatron.util.errors import one_line


@dataclass(frozen=True)
class PlotConfig:
    """Runs, scalar, tables, picture."""

    tb_dir: str = option("runs", aliases=("--tb_dir",))
    """Folder with the TensorBoard folders of the runs, at any depth."""
    tb_event_key: str = option("lm loss", aliases=("--tb_event_key",))
    """Scalar to compare; of a name with slashes the last part counts."""
    csv_dir: str | None = option(None, aliases=("--csv_dir",))
    """Folder of tables that this program wrote before, --csv-name and all; they are compared and
    drawn again, and TensorBoard's are not read."""
    metrics: tuple[str, ...] = option(())
    """NAME=FILE ...: the metrics.jsonl of each run, whose validation losses and tasks are drawn, a
    panel for each, and not TensorBoard's."""
    experts: str | None = option(None)
    """The metrics.jsonl of a run, whose use of experts is drawn, by layer over consumed tokens, and
    nothing else."""
    csv_name: str = option("", aliases=("--csv_name",))
    """Beginning of the names of the tables, before uc_out_."""
    plot_name: str = option("uni_ckpt_char.png", aliases=("--plot_name",))
    """PNG file to draw."""
    plot_title: str = option("Universal checkpoints", aliases=("--plot_title",))
    """Title of the picture."""
    plot_x_label: str = option("step", aliases=("--plot_x_label",))
    """Label of the horizontal axis."""
    plot_y_label: str = option("loss", aliases=("--plot_y_label",))
    """Label of the vertical axis."""
    skip_plot: bool = option(False, aliases=("--skip_plot",))
    """Draw no picture."""
    skip_csv: bool = option(False, aliases=("--skip_csv",))
    """Write no tables."""


def main(argv: Sequence[str] | None = None) -> None:
    (options,) = parse_configs((PlotConfig,), argv, description=__doc__)
    try:
        run(options)
    except (ValueError, OSError) as error:
        print(f"plot_runs.py: error: {one_line(error)}", file=sys.stderr)
        sys.exit(2)


def run(options: PlotConfig) -> None:
    if options.experts is not None:
        plot_loads(options.experts, options.plot_name)
        print(f"use of experts in {options.experts}: {options.plot_name}")
        return
    if options.metrics:
        draw_evaluations(options)
        return
    if options.csv_dir is None:
        curves = read_curves(options.tb_dir, options.tb_event_key)
    else:
        curves = read_tables(options.csv_dir, f"{options.csv_name}uc_out_")
    first, *others = curves
    print(f"{options.tb_event_key} of {first.name}: steps {first.steps[0]} to {first.steps[-1]}")
    for curve in others:
        print(compared(first, curve))
    if not options.skip_csv and options.csv_dir is None:
        for curve in curves:
            write_csv(curve, f"{options.csv_name}uc_out_{curve.name}.csv")
    if not options.skip_plot:
        labels = options.plot_title, options.plot_x_label, options.plot_y_label
        plot_curves(curves, options.plot_name, *labels)


def draw_evaluations(options: PlotConfig) -> None:
    """The picture of --metrics."""
    pairs = [word.partition("=") for word in options.metrics]
    if not all(equals for _, equals, _ in pairs) or len({name for name, *_ in pairs}) < len(pairs):
        raise ValueError(f"--metrics {' '.join(options.metrics)}: give NAME=FILE, each NAME once")
    panels = read_evaluations({name: file for name, _, file in pairs})
    title = options.plot_title if options.plot_title != PlotConfig.plot_title else "Evaluations"
    draw_panels(panels, options.plot_name, "consumed tokens", title)
    print(f"{options.plot_name}: {', '.join(' '.join(panel.y.split()) for panel in panels)}")


def compared(first: RunCurve, other: RunCurve) -> str:
    """Return where the other run begins and how far it gets from the first."""
    ours, theirs = first.by_step(), other.by_step()
    common = sorted(ours.keys() & theirs.keys())
    text = f"{other.name}: steps {other.steps[0]} to {other.steps[-1]}"
    if not common:
        return f"{text}, none of which {first.name} has"
    start = common[0]
    worst = max(common, key=lambda step: abs(ours[step] - theirs[step]))
    return (
        f"{text}; step {start}: {theirs[start]:.6f}, in {first.name} {ours[start]:.6f}; largest "
        f"difference {abs(ours[worst] - theirs[worst]):.2e} at step {worst}"
    )


if __name__ == "__main__":
    main()
