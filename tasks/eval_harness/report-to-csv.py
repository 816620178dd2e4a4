#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Writes accuracy, normalised accuracy and F1 of lm-eval's results as CSV.

    python tasks/eval_harness/report-to-csv.py results.json

The columns of results.csv are task, metric, value, err and version. The results are those of
tasks/eval_harness/evaluate.py, tools/evaluate.py or lm-eval itself, of versions 0.2 to 0.4.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from megatron.apps.tasks.harness.version_02 import write_table  # noqa: E402
from megatron.config.command_line import CommandParser  # noqa: E402
from megatron.run.process import errors_for_users  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and writes the table."""
    parser = CommandParser(__doc__, usage="%(prog)s [--output FILE] RESULTS")
    parser.add_argument("results", metavar="RESULTS", help="file of results")
    parser.add_argument(
        "--output", metavar="FILE", help="table (default: RESULTS with the ending .csv)"
    )
    options = parser.parse_args(argv)
    with errors_for_users():
        print(write_table(Path(options.results), options.output))


if __name__ == "__main__":
    main()
