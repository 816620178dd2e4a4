#!/usr/bin/env python
"""Time of a step of fine-tuning, against its peers and the matrix products alone.

    python benchmarks/tune.py
    python benchmarks/tune.py --tasks lora dpo --rounds 9 --json tune.json
    python benchmarks/tune.py --tasks full --layers 8 --hidden-size 512 --seq-length 512

A task is full (all weights), lora (rank 16, on all linear layers of the blocks) or dpo (all
weights; pairs of answers, the reference's log-probabilities known before the first step). The
model is a Llama with random weights in a folder of Hugging Face, from which all start. Every
contestant is a process of its own; in each round each makes its steps, in another order every
time, while the others wait. Times are CPU time (user and system) of the process, or CUDA events;
memory is the most at any time of a round. docs/evidence/benchmarks.md says what each is.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from contestants.command import TOLERANCE
from contestants.measure import Measurement, Result
from contestants.process import ContestantError, environment, prepare
from contestants.registry import FLOOR, is_ours
from contestants.report import disagreements, ratios, step_seconds
from contestants.setting import Setting

from megatron.util.errors import one_line
from megatron.util.files import write_whole

PEERS = ("hf-deepspeed", "hf-trainer")
CONTESTANTS = {
    "full": ("ours-zero0", "ours-zero1", *PEERS, FLOOR),
    "lora": ("ours-zero0", "ours-zero1", *PEERS, FLOOR),
    "dpo": ("ours-zero0", "ours-zero1", "trl", "trl-reference", FLOOR),
}
"""Who takes part in each task, by default."""
FIRST_STEPS = {"lora": 1, "dpo": 1}
"""The steps with equal losses, where contestants draw some weights, or the order of the pairs."""


def main() -> int:
    """Measures, prints the tables, writes the JSON."""
    options = parser().parse_args()
    found: dict[str, Any] = {"command": " ".join(["python benchmarks/tune.py", *sys.argv[1:]])}
    try:
        for task in options.tasks:
            found[task] = measured(task, options)
            print(markdown(task, found[task]), flush=True)
    except (ValueError, OSError, ContestantError) as error:
        print(f"tune.py: error: {one_line(error)}", file=sys.stderr)
        return 2
    if options.json:
        write_whole(options.json, (json.dumps(found, indent=1) + "\n").encode())
    return 0


def measured(task: str, options: argparse.Namespace) -> dict[str, Any]:
    """A task's rounds, and what follows from them.

    Raises:
        ContestantError: not even the weights could be made.
    """
    names = options.contestants or CONTESTANTS[task]
    with tempfile.TemporaryDirectory(prefix="tune-benchmark-") as folder:
        setting = setting_of(task, options, folder)
        steps = setting.warmup + options.rounds * setting.steps
        machine = prepare(setting, steps, options.peak_tflops * 1e12, environment(setting, True))
        measurement = Measurement(names, setting, True, options.timeout, _say)
        results = measurement.interleaved(options.rounds)
    compared = {
        name: result | {"losses": result["losses"][: FIRST_STEPS.get(task)]}
        for name, result in results.items()
        if "losses" in result
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "setting": dataclasses.asdict(setting) | {"folder": ""},
        "contestants": results,
        "ratios": ratios(results, setting),
        "warnings": disagreements(compared, TOLERANCE[setting.dtype]),
    }


def setting_of(task: str, options: argparse.Namespace, folder: str) -> Setting:
    """The options as a setting of a task.

    Raises:
        ValueError: a shape that no model can have.
    """
    if options.hidden_size % options.heads or options.heads % options.kv_heads:
        raise ValueError("--heads must divide --hidden-size, and --kv-heads divide --heads")
    return Setting(
        layers=options.layers,
        hidden_size=options.hidden_size,
        heads=options.heads,
        kv_heads=options.kv_heads,
        ffn_hidden_size=8 * options.hidden_size // 3 // 64 * 64,
        seq_length=options.seq_length,
        vocab_size=options.vocab_size,
        micro_batch=options.micro_batch,
        micro_batches=1,
        architecture="llama",
        dtype=options.dtype,
        threads=options.threads,
        warmup=options.warmup,
        steps=options.steps,
        folder=folder,
        task="pretrain" if task == "full" else task,
        lora_rank=options.lora_rank,
        answer_length=options.seq_length // 2 if task == "dpo" else 0,
    )


def markdown(task: str, found: dict[str, Any]) -> str:
    """The table of a task: a row for each contestant, with its time over each of the others."""
    setting, results = Setting(**found["setting"]), found["contestants"]
    others = [name for name in results if not is_ours(name) and results[name]["rounds"]]
    clock = "GPU" if found["machine"]["cuda"] else "CPU"
    lines = [
        f"{task}: llama, {setting.layers} layers, hidden {setting.hidden_size}, {setting.heads} "
        f"heads ({setting.kv_heads} of keys), sequence {setting.seq_length}, vocabulary "
        f"{setting.vocab_size:,}, {setting.rows} rows a step, {setting.dtype}, "
        f"{setting.threads} thread{'s' if setting.threads > 1 else ''}; "
        f"{found['machine']['device']}, {found['date']}",
        "",
        f"| | {clock} ms a step | range | peak MB | {' | '.join(f'/ {n}' for n in others)} |",
        "|---" * (4 + len(others)) + "|",
    ]
    for name, result in results.items():
        if not result["rounds"]:
            why = result.get("failed") or f"skipped: {result.get('missing')}"
            lines.append(f"| {name} | {why} |" + " |" * (2 + len(others)))
            continue
        cells = [name, *_times(result, setting), f"{_peak(result) / 1e6:,.0f}"]
        row = found["ratios"].get(name, {})
        cells += [f"{row[other]:.3f}" if other in row else "" for other in others]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, *found["warnings"], ""])


def _times(result: Result, setting: Setting) -> tuple[str, str]:
    times = [seconds * 1e3 for seconds in step_seconds(result, setting)]
    return f"{statistics.median(times):.1f}", f"{min(times):.1f}-{max(times):.1f}"


def _peak(result: Result) -> int:
    return max(answer["peak_bytes"] for answer in result["rounds"])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--tasks", nargs="+", choices=tuple(CONTESTANTS), default=list(CONTESTANTS), help="(all)")
    add("--layers", type=int, default=4, help="blocks of the model (4)")
    add("--hidden-size", type=int, default=512, help="its width (512)")
    add("--heads", type=int, default=8, help="query heads (8)")
    add("--kv-heads", type=int, default=4, help="key and value heads (4)")
    add("--seq-length", type=int, default=256, help="tokens of a row (256)")
    add("--vocab-size", type=int, default=16384, help="size of the vocabulary (16384)")
    add("--micro-batch", type=int, default=4, help="samples, or pairs, of a step (4)")
    add("--lora-rank", type=int, default=16, help="rank of the additions (16)")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="dtype (bf16)")
    add("--threads", type=int, default=1, help="threads of a process on a CPU (1)")
    add("--warmup", type=int, default=3, help="steps before anything is measured (3)")
    add("--rounds", type=int, default=5, help="rounds that are measured (5)")
    add("--steps", type=int, default=4, help="steps of a round (4)")
    add("--contestants", nargs="+", help="NAME ...; ours-zero1+FLAG+FLAG=VALUE adds flags")
    add("--peak-tflops", type=float, default=1.0, help="of the device; not used")
    add("--timeout", type=float, default=900, help="seconds for a start and for a round (900)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    return result


if __name__ == "__main__":
    sys.exit(main())
