#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Verifies that checkpoints are complete and undamaged.

    python tools/verify_checkpoint.py checkpoints
    python tools/verify_checkpoint.py checkpoints --all
    python tools/verify_checkpoint.py checkpoints/global_step100 elsewhere/global_step200

In a folder of several it verifies the checkpoint that --load would choose, or with --all every one.
In this project's format it compares size and SHA-256 of every file with the manifest, and checks
that the slices of every parameter are complete and their tensors present. In other formats it reads
every tensor. The exit status is 1 when anything is damaged; the file is named.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.config.command_line import CommandParser
from megatron.formats.inspection import Verdict, verify_all
from megatron.util.errors import one_line

TITLES = ("checkpoint", "files", "MB", "tensors", "seconds", "")


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    rows: list[tuple[str, ...]] = [TITLES]
    errors = []
    for path in options.folders:
        verdicts = verify_all(path, options.all)
        while True:
            began = time.perf_counter()
            verdict = next(verdicts, None)
            if verdict is None:
                break
            rows.append(row(verdict, time.perf_counter() - began))
            if verdict.error is not None:
                errors.append(f"{'damaged' if verdict.there else 'error'}: {verdict.error}")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for words in rows:
        first, *others = zip(words, widths, strict=True)
        line = [first[0].ljust(first[1]), *(word.rjust(width) for word, width in others[:-1])]
        print("  ".join([*line, words[-1]]).rstrip())
    for error in errors:
        print(one_line(error), file=sys.stderr)
    return 1 if errors else 0


def parser() -> CommandParser:
    result = CommandParser(__doc__)
    result.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR",
        help="one checkpoint of any format, or a folder of several",
    )  # fmt: skip
    result.add_argument("--all", action="store_true", help="verify all checkpoints of each folder")
    return result


def row(verdict: Verdict, seconds: float) -> tuple[str, ...]:
    return (
        str(verdict.folder),
        str(verdict.files),
        f"{verdict.bytes / 1e6:.1f}",
        str(verdict.parameters),
        f"{seconds:.2f}",
        "whole" if verdict.error is None else "DAMAGED" if verdict.there else "not found",
    )


if __name__ == "__main__":
    sys.exit(main())
