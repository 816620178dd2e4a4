"""Report of a fine-tuning run: a self-contained HTML file with its numbers, curves and answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import groupby

from megatron.apps.finetune.summary import TuningSummary, numbers
from megatron.training.registry import METRICS

_LEFT_OUT = frozenset(name for name, metric in METRICS.items() if not metric.curve)
"""Metrics of training steps that are not plotted. They are in metrics.jsonl."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 440, 220, 56, 28, 12
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
_STYLE = """
:root { color-scheme: light dark; --line: #d0d7de; --soft: #57606a; }
@media (prefers-color-scheme: dark) { :root { --line: #444c56; --soft: #9198a1; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; }
td, th { border-top: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: left;
  vertical-align: top; }
.curves { display: flex; flex-wrap: wrap; gap: 1rem; }
.curves figure:first-child { flex-basis: 100%; }
.curves figure:first-child svg { width: 100%; max-width: 50rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; }
svg .grid { stroke: var(--line); } svg polyline { fill: none; stroke-width: 1.8; }
.answers { table-layout: fixed; width: 100%; } .answers th:first-child { width: 24%; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 13px/1.45 monospace; }
summary { cursor: pointer; margin: .6rem 0 .3rem; } .soft { color: var(--soft); }
"""

Curve = tuple[list[float], list[float]]
"""Steps and values to plot."""


def report(summary: TuningSummary, name: str) -> str:
    """Return the HTML page for the fine-tuning run in the folder ``name``."""
    parts = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{escape(summary.method)} of {escape(summary.record.model)}</p>",
        _results(summary),
        '<h2>Curves</h2><div class="curves">',
        *(_figure(title, curves) for title, curves in curves_of(summary).items()),
        "</div>",
        _texts(summary),
        "<h2>Training</h2>",
        _table((), [(key, value) for key, value in summary.facts().items()]),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{escape(name)}: fine-tuning</title>\n<style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def curves_of(summary: TuningSummary) -> dict[str, dict[str, Curve]]:
    """Return the curves of each metric, by dataset ("training", "held out"). Losses come first."""
    curves: dict[str, dict[str, Curve]] = {}
    for row in summary.rows:
        kind, _, name_of_set = row["kind"].partition(" ")
        if kind not in ("train", "validation"):
            continue
        label = "training" if kind == "train" else f"held out {name_of_set}".rstrip()
        for name, value in numbers(row).items():
            if name in _LEFT_OUT:
                continue
            steps, values = curves.setdefault(name, {}).setdefault(label, ([], []))
            steps.append(float(row["iteration"]))
            values.append(value)
    return dict(sorted(curves.items(), key=lambda item: _rank(item[0])))


def _rank(name: str) -> int:
    """Return a sort key: the loss that is minimised, then other losses, then everything else."""
    return 0 if name in ("lm loss", "loss") else 1 if "loss" in name else 2


def _results(summary: TuningSummary) -> str:
    results = summary.results()
    if not results:
        return ""
    title = f"<h2>On {summary.record.held_out:,} held-out samples</h2>"
    return title + _table(("", "before", "after"), results)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<table>"]
    if head:
        lines.append(f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>")
    for row in rows:
        lines.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>")
    return "\n".join([*lines, "</table>"])


def _texts(summary: TuningSummary) -> str:
    """Return the HTML of the answers at each evaluation. Only the last evaluation is expanded."""
    rows = [row for row in summary.rows if row["kind"] == "text"]
    if not rows:
        return ""
    moments = [(step, list(of)) for step, of in groupby(rows, key=lambda row: row["iteration"])]
    parts = ["<h2>Answers</h2>"]
    for number, (step, texts) in enumerate(moments, 1):
        opened = " open" if number == len(moments) else ""
        parts.append(f"<details{opened}><summary>after {step:,} steps</summary>")
        parts.append(
            '<table class="answers"><tr><th>prompt</th><th>answer</th><th>in the data</th></tr>'
        )
        for text in texts:
            end = "" if text["ended"] else '<p class="soft">(not ended)</p>'
            prompt, answer, reference = (
                f"<td><pre>{escape(text[key])}</pre>{note}</td>"
                for key, note in (("prompt", ""), ("answer", end), ("reference", ""))
            )
            parts.append(f"<tr>{prompt}{answer}{reference}</tr>")
        parts.append("</table></details>")
    return "\n".join(parts)


def _figure(title: str, curves: Mapping[str, Curve]) -> str:
    """Return an SVG figure with curves over the steps."""
    steps = [step for xs, _ in curves.values() for step in xs]
    values = [value for _, ys in curves.values() for value in ys]
    low, high = min(values), max(values)
    margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin
    last = max(1.0, *steps)
    width, height = _WIDTH - _LEFT - 10, _HEIGHT - _TOP - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + width * step / last

    def y(value: float) -> float:
        return _TOP + height * (high - value) / (high - low)

    lines = []
    marks = ticks(low, high)
    for tick, text in zip(marks, labels(marks), strict=True):
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/><text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" '
            f'text-anchor="end">{text}</text>'
        )
    for tick in ticks(0.0, last):
        lines.append(
            f'<text x="{x(tick):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">{tick:g}</text>'
        )
    legend = []
    for (label, (xs, ys)), colour in zip(curves.items(), _COLOURS * len(curves), strict=False):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(xs, ys, strict=True))
        lines.append(f'<polyline points="{path}" stroke="{colour}"/>')
        lines += [
            f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.2" fill="{colour}"/>'
            for a, b in zip(xs, ys, strict=True)
            if len(xs) <= 40
        ]
        legend.append(
            f'<span style="color:{colour}">{escape(label)}</span> '
            f'<span class="soft">{ys[-1]:.5g}</span>'
        )
    caption = escape(title.replace("_", " "))
    return (
        f'<figure><figcaption>{caption}</figcaption><svg width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{caption}">{"".join(lines)}</svg>'
        f"<div>{' &nbsp; '.join(legend)}</div></figure>"
    )


def ticks(low: float, high: float) -> list[float]:
    """Return about four round numbers between two bounds, for an axis."""
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step *= next((n for n in (1, 2, 5) if (high - low) / (n * step) <= 5), 10)
    first = math.ceil(low / step)
    return [round(n * step, 12) for n in range(first, math.floor(high / step) + 1)]


def labels(marks: Sequence[float]) -> list[str]:
    """Format numbers with enough digits to distinguish them."""
    labels_shown: list[str] = []
    for digits in range(6, 16):
        labels_shown = [f"{mark:.{digits}g}" for mark in marks]
        if len(set(labels_shown)) == len(set(marks)):
            break
    return labels_shown
