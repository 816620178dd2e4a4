#!/usr/bin/env python
"""Everything about speed on one GPU, for minutes that are rented; `make bench-gpu` runs it.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --time-limit 9 --bundle out/gpu.tgz
    python benchmarks/gpu.py --merge gpu-1.tgz gpu-2.tgz --into benchmarks/RESULTS.md
    python benchmarks/gpu.py --dry-run

Runs from a source tree, without installation, network or preparation: with PYTHONPATH set to the
tree and a folder with DeepSpeed, wherever torch is. The most valuable measurement comes first. One
that does not fit into the time left is passed over for the next that does; one that was cut off
twice comes last. What is done is kept in --results, and in the --bundle after every measurement,
and is not done again: the same command continues, on another machine of the same kind too.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from gpu_suite.ladder import GROUPS, SCALES, cells  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
H100_FLOPS = 989e12
"""Peak for which durations are estimated in --dry-run."""


def main(argv: list[str] | None = None) -> int:
    """Measures what has not been measured; 0 when nothing is left, 3 when something is."""
    options = parse(argv)
    if options.worker:
        from gpu_suite.worker import serve

        serve()
    groups = options.groups.split(",") if options.groups else GROUPS
    names = options.cells.split(",") if options.cells else []
    known = {cell.name for cell in cells(options.scale)}
    for flag, given, valid in (("--groups", groups, set(GROUPS)), ("--cells", names, known)):
        unknown = sorted(set(given) - valid)
        if unknown:
            return _error(f"{flag} {', '.join(unknown)}: there are {', '.join(sorted(valid))}")
    work = cells(options.scale, groups, names)
    if options.dry_run:
        for cell in work:
            print(f"{cell.name}: {cell.contestant}, about {cell.seconds(H100_FLOPS):.0f} s")
        return 0
    try:
        if options.merge:
            return merge(options.merge, options.into)
        return measure(options, work)
    except (ValueError, OSError) as error:
        return _error(str(error))


def measure(options: argparse.Namespace, work: list) -> int:
    """Runs the cells; see :func:`main`."""
    from gpu_suite.processes import OutOfTime, WorkerDied
    from gpu_suite.results import Results
    from gpu_suite.schedule import Suite
    from gpu_suite.table import markdown

    from megatron.util.files import write_whole

    if options.scale == "full" and not _has_gpu():
        return _error("torch sees no GPU; --scale tiny tries this on a CPU")
    bundle = options.bundle and options.bundle.absolute()
    if bundle and not bundle.parent.is_dir():
        raise ValueError(f"--bundle {bundle}: {bundle.parent} is not a directory")
    results = Results(options.results.absolute())
    if bundle and bundle.exists():
        results.unpack(bundle)
    if options.retry_failed:
        results.forget_failures()

    def keep() -> None:
        write_whole(results.folder / "results.md", markdown(results.all()).encode())
        if bundle:
            results.pack(bundle)

    limit = None if options.time_limit is None else options.time_limit * 60
    try:
        done = Suite(results, _say, keep, limit).run(work)
    except (WorkerDied, OutOfTime) as error:
        return _error(f"no worker starts: {error}; see {results.folder / 'worker.log'}")
    keep()
    print(results.folder / "results.md")
    return 0 if done else 3


def merge(files: list[Path], into: Path | None) -> int:
    """Prints the tables of several bundles, and puts them into a file's own section."""
    from gpu_suite.results import merged, read_bundle
    from gpu_suite.table import refresh, report

    text = report(merged(read_bundle(file) for file in files))
    print(text, end="")
    if into is not None:
        refresh(into, text)
    return 0


def parser() -> argparse.ArgumentParser:
    """The flags."""
    result = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = result.add_argument
    add("--results", type=Path, default=RESULTS, help="folder (benchmarks/results/gpu)")
    add("--bundle", type=Path, metavar="FILE", help="keep all of it here too; read at the start")
    add("--time-limit", type=float, metavar="MINUTES", help="end after that; status 3 if cut short")
    add("--groups", default="", help=f"of {', '.join(GROUPS)} (all)")
    add("--cells", default="", help="only these, by their names in --dry-run")
    add("--scale", choices=tuple(SCALES), default="full", help="tiny: a trial on any machine")
    add("--retry-failed", action="store_true", help="make those again that have no numbers")
    add("--dry-run", action="store_true", help="print the cells and estimates for an H100")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="print the tables of bundles")
    add("--into", type=Path, metavar="FILE", help="with --merge: also as a section of this file")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return result


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags' values; those that contradict each other end the program."""
    flags = parser()
    options = flags.parse_args(argv)
    if options.time_limit is not None and not options.time_limit > 0:
        flags.error(f"--time-limit {options.time_limit:g}: expected minutes, more than 0")
    if options.into and not options.merge:
        flags.error(f"--into {options.into} is for the tables of --merge FILE ...: give that too")
    if options.groups and options.cells:
        flags.error("--groups and --cells both select: give one of them")
    return options


def _has_gpu() -> bool:
    import torch  # a second, not needed to print cells

    return torch.cuda.is_available()


def _error(message: str) -> int:
    print(f"gpu.py: error: {message}", file=sys.stderr)
    return 2


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
