#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Leaves out all but the first document of each group of near-duplicates.

python tools/openwebtext/remove_group_duplicates.py groups.json clean.jsonl unique.jsonl
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.duplicates import remove_duplicates
from megatron.apps.corpus.collection.line_job import run_tool


def main(argv: Sequence[str] | None = None) -> None:
    run_tool(
        "remove_group_duplicates.py",
        __doc__,
        remove_duplicates,
        argv,
        positional=("--groups", "--input", "--output"),
    )


if __name__ == "__main__":
    main()
