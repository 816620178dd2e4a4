#!/usr/bin/env python
"""Prints the results of ds_evalharness_parallel_run.sh and the average accuracy of a checkpoint.

    python ds_evalharness_gather_result.py eval_results [FOLDER ...]

Of a task that has no accuracy its exact match or F1 counts; perplexities are printed only.
"""

import json
import statistics
import sys
from pathlib import Path

COUNTED = ("acc", "em", "f1")


def main() -> None:
    """Parses the command line and prints a table for each checkpoint."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    files = sorted(path for folder in sys.argv[1:] for path in Path(folder).rglob("*shot.json"))
    if not files:
        sys.exit(f"{' '.join(sys.argv[1:])}: error: no file *shot.json")
    for folder in sorted({path.parent for path in files}):
        print(folder)
        counted = []
        for path in files:
            if path.parent == folder:
                counted += task_values(path)
        if counted:
            print(f"average accuracy of {len(counted)} tasks: {statistics.mean(counted):.4f}")


def task_values(path: Path) -> list[float]:
    """Prints the metrics of the tasks of a file and returns those that count."""
    counted = []
    for task, metrics in json.loads(path.read_text())["results"].items():
        values = {name: value for name, value in metrics.items() if not name.endswith("_stderr")}
        print(f"{task} ({path.stem.rpartition('_')[2]}):", *(f"{n} {v}" for n, v in values.items()))
        counted += [values[name] for name in COUNTED if name in values][:1]
    return counted


if __name__ == "__main__":
    main()
