#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Repairs texts, and leaves out other languages and short documents.

python tools/openwebtext/cleanup_dataset.py pages.jsonl clean.jsonl
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.cleaning import cleanup
from megatron.apps.corpus.collection.line_job import run_tool


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("cleanup_dataset.py", __doc__, cleanup, argv, positional=("--input", "--output"))


if __name__ == "__main__":
    main()
