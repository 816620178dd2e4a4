#!/usr/bin/env python
"""Prints the results of the fine-tuning scripts, over the seeds of each task and learning rate.

    python ds_finetune_gather_result.py output/log [FOLDER ...]

Each log is that of one seed, TASK-bsz32-lr2e-5-epochs3-seed1234_... . Of its epochs the best one
counts: by Spearman's correlation for STS-B, Matthews' for CoLA, otherwise by the overall accuracy.
What the validation files have at that epoch follows in parentheses.
"""

import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

NAME = re.compile(r"(?P<task>[\w-]+)-bsz\d+-lr(?P<lr>.+)-epochs\d+-seed(?P<seed>\d+)")
LINE = re.compile(r"\|epoch: (\d+)\| (overall|metrics for (.+?)): (.*)")
SCORES = {"STS-B": r"spearmanr = (-?[\d.e-]+)", "CoLA": r"mcc = (-?[\d.e-]+)"}


def best_epoch(path: Path, task: str) -> tuple[float, dict[str, float]] | None:
    """Score of the best epoch of a log, in percent, and those of each validation file."""
    pattern = SCORES.get(task, r"= ([\d.]+) %")
    epochs: dict[str, dict[str, float]] = defaultdict(dict)
    for line in path.read_text(errors="replace").splitlines():
        if (words := LINE.search(line)) and (value := re.search(pattern, words[4])):
            scale = 100 if task in SCORES else 1
            epochs[words[1]][words[3] or "overall"] = scale * float(value[1])
    complete = [scores for scores in epochs.values() if "overall" in scores]
    if not complete:
        return None
    best = max(complete, key=lambda scores: scores["overall"])
    return best.pop("overall"), best


def main() -> None:
    """Parses the command line and prints a line for each task and learning rate."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    runs: dict[tuple[str, str], dict[str, tuple[float, dict[str, float]]]] = defaultdict(dict)
    for path in sorted(file for folder in sys.argv[1:] for file in Path(folder).rglob("*.log")):
        name = NAME.search(path.name)
        if name and (best := best_epoch(path, name["task"])):
            seeds = runs[name["task"], name["lr"]]
            seeds[name["seed"]] = max(best, seeds.get(name["seed"], best), key=lambda run: run[0])
    if not runs:
        sys.exit(f"{' '.join(sys.argv[1:])}: error: no log with the results of a fine-tuning")
    for (task, lr), seeds in runs.items():
        values = [value for value, _ in seeds.values()]
        median = statistics.median_high(values)
        files = next(files for value, files in seeds.values() if value == median)
        shown = ", ".join(f"{name} {value:.2f}" for name, value in files.items())
        spread = f", std {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        print(
            f"{task} lr {lr}: median {median:.2f} ({shown}), mean "
            f"{statistics.mean(values):.2f}{spread}, seeds {' '.join(seeds)}"
        )


if __name__ == "__main__":
    main()
