"""The measurements as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpu_suite.plan import Job
from gpu_suite.run import Results, failure

HEADS = {
    "sizes": "Sizes, and peers at the same batch",
    "optimisations": "What each optimisation gives: all of them, then one of them otherwise",
    "sequences": "Sequence lengths",
}
COLUMNS = (
    "model", "sequence", "", "samples a step", "ms a step", "over the first", "tokens per s",
    "MFU, causal", "MFU, whole", "peak GB", "loss at first step", "at last",
)  # fmt: skip


def markdown(jobs: Sequence[Job], results: Results) -> str:
    """Tables of all that was measured; what was not yet is left out."""
    found = [(job, known) for job in jobs if (known := results.of(job)) is not None]
    lines = ["# Measured by `benchmarks/gpu.py`", ""]
    machine = next((known["machine"] for _, known in found if "machine" in known), None)
    if machine is not None:
        versions = ", ".join(
            f"{name} {machine[name]}" for name in ("torch", "cuda", "deepspeed", "transformers")
        )
        lines += [
            f"{machine['device']}, peak {machine['peak_flops'] / 1e12:,.4g} TFLOP/s in bf16 "
            f"({machine['peak_is']}), {machine['cores']} cores; {versions}; Python "
            f"{machine['python']}. fp8 rows are measured against the same peak. Each row is a run "
            "of its own; the JSON beside this file says by which command. Commands, numerics: "
            "docs/reference/benchmarks.md.",
            "",
        ]
    for part, head in HEADS.items():
        rows = [(job, known) for job, known in found if job.part == part]
        if rows:
            lines += [f"## {head}", "", *_table(rows), ""]
    for job, known in found:
        if job.part == "tests":
            text = known.get("failed") or f"{known['summary']} (exit status {known['status']})"
            lines += ["## Test suite", "", f"`pytest -m 'not proof'`: {text}", ""]
    lines.append(f"{len(found)} of {len(jobs)} measurements made.")
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[tuple[Job, dict[str, Any]]]) -> list[str]:
    lines = [_cells(COLUMNS), "|---" * len(COLUMNS) + "|"]
    first: dict[tuple[str, int], float] = {}
    for job, known in rows:
        start = [job.model, str(job.seq_length), job.variant]
        why = failure(job, known)
        if why is not None:
            lines.append(_cells([*start, why.replace("|", "/"), *[""] * 8]))
            continue
        summed, setting = known["summaries"][job.contestant], known["setting"]
        seconds = summed["seconds_per_step"]
        base = first.setdefault((job.model, job.seq_length), seconds)
        losses = [summed["first_loss"], summed["last_loss"]]
        lines.append(
            _cells(
                [
                    *start,
                    str(setting["micro_batch"] * setting["micro_batches"]),
                    f"{seconds * 1e3:,.1f}",
                    f"{seconds / base:.3f}",
                    f"{summed['tokens_per_second']:,.0f}",
                    f"{summed['mfu_causal']:.1%}",
                    f"{summed['mfu_whole']:.1%}",
                    f"{summed['peak_bytes'] / 1e9:.2f}",
                    *("" if loss is None else f"{loss:.4f}" for loss in losses),
                ]
            )
        )
    return lines


def _cells(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
