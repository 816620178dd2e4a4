#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Groups the near-duplicates that find_duplicates.py found.

python tools/openwebtext/group_duplicate_url.py duplicates.json groups.json
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.duplicates import group_duplicates
from megatron.apps.corpus.collection.line_job import run_tool


def main(argv: Sequence[str] | None = None) -> None:
    run_tool(
        "group_duplicate_url.py",
        __doc__,
        group_duplicates,
        argv,
        positional=("--input", "--output", "--threshold"),
    )


if __name__ == "__main__":
    main()
