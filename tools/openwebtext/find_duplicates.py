#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Finds near-duplicates by MinHash and locality-sensitive hashing.

python tools/openwebtext/find_duplicates.py --inputs clean.jsonl url --output duplicates.json
"""

import sys
from collections.abc import Sequence

from megatron.apps.corpus.collection.duplicates import find_duplicates
from megatron.apps.corpus.collection.line_job import run_tool


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) > 1 and not any(word.startswith("-") for word in words[:2]):
        # Megatron's form of 2019: find_duplicates.py IN OUT, with ids under the key "url".
        words[:2] = ["--inputs", words[0], "url", "--output", words[1]]
    run_tool("find_duplicates.py", __doc__, find_duplicates, words)


if __name__ == "__main__":
    main()
