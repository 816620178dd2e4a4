"""Draws compositions for some minutes and compares each with one process:

python tests/compositions/run.py --minutes 30
python tests/compositions/run.py --seeds 17 4242

Prints what differs, made as small as it goes, and a line of ``tests/compositions/log.jsonl``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = map(str, (ROOT, TESTS, TESTS / "helpers", TESTS / "distributed"))

from ledger import commit  # noqa: E402
from pool import Pool, RankError  # noqa: E402

from compositions.compare import STAGES, difference  # noqa: E402
from compositions.draw import Composition, drawn, refusal  # noqa: E402
from megatron.config import ConfigError  # noqa: E402

LOG = HERE / "log.jsonl"


def outcome(pool: Pool, composition: Composition, only: str | None = None) -> str:
    """Return ``refused``, ``equal``, or what is wrong; see :func:`compare.difference`."""
    try:
        if refusal(composition) is not None:
            return "refused"
        return difference(pool, composition, only) or "equal"
    except ConfigError:
        return "refused"
    except RankError as error:
        if "ConfigError: " in str(error):
            return "refused"
        return f"failed: {_last_line(str(error))}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1])


def smallest(pool: Pool, composition: Composition, wrong: str) -> tuple[Composition, str]:
    """Return the composition with all removed that its failure does not need."""
    kind = wrong.partition(":")[0]
    for smaller in composition.smaller():
        now = outcome(pool, smaller, kind if kind in STAGES else None)
        if now.partition(":")[0] == kind:
            return smallest(pool, smaller, now)
    return composition, wrong


def campaign(seeds: Iterable[int], end: float) -> dict[str, object]:
    """Compare compositions until the time is over; returns a line for the log."""
    counts: Counter[str] = Counter()
    findings, first, last, started = [], None, 0, time.monotonic()
    with contextlib.closing(Pool()) as pool:
        for seed in seeds:
            if time.monotonic() > end:
                break
            first, last = seed if first is None else first, seed
            composition = drawn(seed)
            result = outcome(pool, composition)
            counts[result if result in ("refused", "equal") else "wrong"] += 1
            if result in ("refused", "equal"):
                continue
            print(f"== {composition}\n   {result}", flush=True)
            small, result = smallest(pool, composition, result)
            print(f"   smallest: {small}\n   {result}\n   {' '.join(small.flags())}", flush=True)
            findings.append({"seed": seed, "smallest": str(small), "what": result})
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "seeds": [first, last],
        "minutes": round((time.monotonic() - started) / 60, 1),
        **{name: counts[name] for name in ("equal", "refused", "wrong")},
        "findings": findings,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--from", dest="first", type=int, default=None, help="the first seed")
    parser.add_argument("--seeds", type=int, nargs="+", help="only these, and no line in the log")
    options = parser.parse_args()
    if options.seeds:
        line = campaign(options.seeds, float("inf"))
        print(json.dumps(line))
        return int(bool(line["findings"]))
    first = options.first if options.first is not None else next_seed()
    line = campaign(range(first, first + 10**9), time.monotonic() + 60 * options.minutes)
    with LOG.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    print(json.dumps(line))
    return int(bool(line["findings"]))


def next_seed() -> int:
    """Return the first seed that no line of the log has."""
    lines = LOG.read_text("utf-8").splitlines() if LOG.exists() else []
    return max((json.loads(line)["seeds"][1] + 1 for line in lines), default=0)


if __name__ == "__main__":
    sys.exit(main())
