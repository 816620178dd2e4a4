"""Runs fuzzers for some minutes, several next to each other:

python tests/fuzz/run.py --minutes 10 --jobs 4
python tests/fuzz/run.py indexed gpt2-vocabulary --minutes 1
python tests/fuzz/run.py indexed --edits 3:17 0:4231
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
DETOXIFYING = ROOT / "examples_deepspeed/megatron/detxoify_lm"
sys.path[:0] = map(str, (ROOT, ROOT / "tests", ROOT / "tests/helpers", DETOXIFYING))

from fuzz.campaign import Summary, campaign  # noqa: E402
from fuzz.edits import Edit  # noqa: E402
from fuzz.fuzzers import FUZZERS  # noqa: E402
from fuzz.sandbox import Sandbox  # noqa: E402


def run(name: str, minutes: float, seed: int) -> int:
    """One campaign; prints findings when they are made, and a line of a table at the end. Returns
    the number of findings."""
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as scratch,
        Sandbox(FUZZERS[name], Path(scratch)) as sandbox,
    ):
        for event in campaign(sandbox, minutes * 60, seed):
            if isinstance(event, Summary):
                inputs = event.read + event.refused
                row = (name, f"{inputs:,}", f"{event.read:,}", f"{minutes:g}", event.findings)
                print("|", " | ".join(map(str, row)), "|", flush=True)
                return event.findings
            print(f"== {name}: {event}", flush=True)
    raise AssertionError("a campaign ends with its summary")


def apart(name: str, minutes: float, seed: int) -> int:
    """One campaign in a program of its own, with no other's leftovers. Returns its exit status."""
    words = [sys.executable, __file__, name, "--minutes", str(minutes), "--seed", str(seed)]
    return subprocess.run(words, check=False).returncode


def once(name: str, edits: list[Edit]) -> None:
    """One input; prints what happens."""
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-") as scratch,
        Sandbox(FUZZERS[name], Path(scratch)) as sandbox,
    ):
        finding = sandbox.finding(edits)
        verdict = "read" if sandbox.read else "refused"
        print(verdict if finding is None else f"{finding.rule}\n{finding.detail}")


def _edit(text: str) -> Edit:
    if not re.fullmatch(r"\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"{text}: expected FILE:SEED, two numbers such as 3:17")
    file, _, seed = text.partition(":")
    return Edit(int(file), int(seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"by default all: {', '.join(FUZZERS)}")
    parser.add_argument("--minutes", type=float, default=1.0, help="of each")
    parser.add_argument("--jobs", type=int, default=1, help="fuzzers next to each other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--edits", type=_edit, nargs="+", help="one input: FILE:SEED ...")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in FUZZERS]
    if unknown:
        parser.error(f"no fuzzer {', '.join(unknown)}; there are {', '.join(FUZZERS)}")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g}: expected a number above 0")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: expected a number of at least 1")
    if args.edits and len(args.names) != 1:
        parser.error("--edits is one input of one fuzzer: give its name")
    names = args.names or list(FUZZERS)
    if args.edits:
        once(names[0], args.edits)
        return
    if len(names) == 1:
        sys.exit(bool(run(names[0], args.minutes, args.seed)))
    with ThreadPoolExecutor(args.jobs) as pool:
        codes = list(pool.map(lambda name: apart(name, args.minutes, args.seed), names))
    failed = [name for name, code in zip(names, codes, strict=True) if code]
    print(f"findings or failures: {', '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
