"""Tries faults on real trainings, one after the other, and prints a row of the table for each:

python tests/faults/run.py --list
python tests/faults/run.py stop-rank-1-2-stages kill-worker-1
python tests/faults/run.py
python tests/faults/run.py --campaign 200 --seed 1 --minutes 25
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]

from faults.campaign import Tally, campaign  # noqa: E402
from faults.fault import attempt  # noqa: E402
from faults.table import FAULTS  # noqa: E402
from faults.training import Undisturbed  # noqa: E402
from warm_runs import WarmRuns  # noqa: E402


def main() -> None:
    """Exits with 1 if something was silent, late, blamed wrongly or lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of faults; all by default")
    parser.add_argument("--list", action="store_true", help="the names, and how each is injected")
    parser.add_argument("--campaign", type=int, metavar="N", help="N random faults instead")
    parser.add_argument("--seed", type=int, default=0, help="of --campaign")
    parser.add_argument("--minutes", type=float, default=25.0, help="of --campaign, at most")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th of them")
    args = parser.parse_args()
    if args.campaign:
        sys.exit(bool(_campaign(args.campaign, args.seed, args.minutes).wrong))
    if args.list:
        for fault in FAULTS.values():
            print(f"{fault.name:36} {fault.title} ({fault.shape.name})")
        return
    unknown = [name for name in args.names if name not in FAULTS]
    if unknown:
        parser.error(f"no fault {', '.join(unknown)}; see --list")
    part, parts = map(int, args.part.split("/"))
    names = (args.names or list(FAULTS))[part - 1 :: parts]
    sys.exit(bool(_try_all(names)))


def _campaign(faults: int, seed: int, minutes: float) -> Tally:
    warm = WarmRuns("faults.program")
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        tally = campaign(
            warm, Path(scratch), faults, seed, minutes, lambda line: print(line, flush=True)
        )
    warm.stop()
    return tally


def _try_all(names: list[str]) -> list[str]:
    """Those that failed."""
    warm, failed = WarmRuns("faults.program"), list[str]()
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        undisturbed = Undisturbed(warm, Path(scratch))
        for name in names:
            try:
                outcome = attempt(FAULTS[name], warm, Path(scratch) / name, undisturbed)
            except Exception:  # the others are tried
                failed.append(name)
                print(f"== {name}: FAILED\n{traceback.format_exc()[-4000:]}", flush=True)
                continue
            print(outcome.row(), flush=True)
            if outcome.wrong:
                failed.append(name)
                print(f"== {name}: FAILED: " + "\n   ".join(outcome.wrong), flush=True)
    warm.stop()
    print(f"{len(names)} faults tried, {len(failed)} failed: {' '.join(failed) or 'none'}")
    return failed


if __name__ == "__main__":
    main()
