#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Compares the activations of models of several widths, with muP and without, while they learn.

    python tools/coordinate_check.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 \
        --seq-length 32 --micro-batch-size 4 --global-batch-size 4 --lr 1e-2 --mock-data \
        --tokenizer-type NullTokenizer --vocab-size 512 --picture coordinates.png

The flags describe the narrowest model, the base; wider ones have more heads of the same size. Every
model trains some steps on one process, and the mean absolute change of each activation since the
first step is a power of the width: the table has the exponents. With muP they are about 0, so that
the learning rate of the base fits all widths. The exit status is 1 where one is above 0.1.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.apps.parity.coordinates import CoordinateFlags, compare
from megatron.checkpoint.files import write_json
from megatron.run.run import RunToolParser
from megatron.util.errors import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    try:
        flags, settings = RunToolParser(CoordinateFlags, __doc__).parse(argv)
        with contextlib.redirect_stdout(io.StringIO()):  # the lines of each training
            report = compare(settings, flags)
        if flags.json:
            write_json(Path(flags.json), report.to_dict())
        if flags.picture:
            report.draw(Path(flags.picture))
    except (ValueError, OSError) as error:
        print(one_line(error), file=sys.stderr)
        return 2
    print(report.table())
    verdict = "flat" if report.flat else "not flat"
    print(
        f"changes with muP are {verdict}: the largest exponent of the width is {report.worst():.2f}"
    )
    return 0 if report.flat else 1


if __name__ == "__main__":
    sys.exit(main())
