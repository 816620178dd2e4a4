#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Splits a corpus into train, valid and test; equal texts are in one part.

python tools/split_json.py --input corpus.jsonl --output-dir parts --split 90,5,5
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.line_job import run_tool
from megatron.apps.corpus.collection.reshaping import split_corpus


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("split_json.py", __doc__, split_corpus, argv)


if __name__ == "__main__":
    main()
