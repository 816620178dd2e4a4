#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Finds near-duplicates by MinHash and locality-sensitive hashing.

python tools/openwebtext/find_duplicates.py --inputs clean.jsonl url --output duplicates.json
"""

from collections.abc import Sequence

from megatron.corpus.collection.duplicates import find_duplicates
from megatron.corpus.collection.line_job import run_tool


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("find_duplicates.py", __doc__, find_duplicates, argv)


if __name__ == "__main__":
    main()
