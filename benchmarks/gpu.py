#!/usr/bin/env python
"""Everything about speed on one GPU, as one command; `make bench-gpu` runs it.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --dry-run
    python benchmarks/gpu.py --parts sizes,optimisations --time-limit 55

Sizes from 124M to 7B in bf16 and fp8 with peers and the matrix products' own time, what each
optimisation gives, the test suite, sequences from 1024 to 8192. Each measurement is a process of
its own with a timeout; one that fails or finds no memory becomes a row that says so. What is done
is kept in --results, a JSON file each and results.md, and is not done again: run the same command
again to continue.
"""

import argparse
import shlex
import sys
from pathlib import Path

from gpu_suite.plan import PARTS, SCALES, jobs
from gpu_suite.run import Results, run_all
from gpu_suite.table import markdown

from megatron.util.files import write_whole

RESULTS = Path(__file__).resolve().parent / "results" / "gpu"


def main(argv: list[str] | None = None) -> int:
    """Measures what has not been measured; 0 when nothing is left."""
    options = parser().parse_args(argv)
    parts = options.parts.split(",")
    unknown = set(parts) - set(PARTS)
    if unknown:
        print(f"gpu.py: error: --parts {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}",
              file=sys.stderr)  # fmt: skip
        return 2
    scale = SCALES[options.scale]
    results = Results(options.results.absolute())
    work = jobs(scale, parts, results.config)
    if options.dry_run:
        for job in work:
            print(f"{job.name}: {shlex.join(job.command)}")
        return 0
    if options.scale == "full" and not _has_gpu():
        print("gpu.py: error: torch sees no GPU; --scale tiny tries this on a CPU", file=sys.stderr)
        return 2
    if options.retry_failed:
        results.forget_failures(work)

    def write_table() -> None:
        write_whole(results.folder / "results.md", markdown(work, results).encode())

    limit = None if options.time_limit is None else options.time_limit * 60
    done = run_all(work, results, limit, _say, write_table)
    write_table()
    print(f"{results.folder / 'results.md'}")
    return 0 if done else 3


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--results", type=Path, default=RESULTS, help="folder (benchmarks/results/gpu)")
    add("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, in this order (all)")
    add("--scale", choices=tuple(SCALES), default="full", help="tiny: a trial on any machine")
    add("--time-limit", type=float, metavar="MINUTES", help="end after that; status 3 if cut short")
    add("--retry-failed", action="store_true", help="make those again that failed")
    add("--dry-run", action="store_true", help="print the commands")
    return result


def _has_gpu() -> bool:
    import torch  # a second, not needed to print commands

    return torch.cuda.is_available()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
