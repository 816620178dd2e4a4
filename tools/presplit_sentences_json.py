#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Puts each sentence of a text on a line of its own, for --presplit-sentences.

python tools/presplit_sentences_json.py corpus.jsonl corpus_sentences.jsonl
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.line_job import run_tool
from megatron.apps.corpus.collection.reshaping import presplit


def main(argv: Sequence[str] | None = None) -> None:
    run_tool(
        "presplit_sentences_json.py", __doc__, presplit, argv, positional=("--input", "--output")
    )


if __name__ == "__main__":
    main()
