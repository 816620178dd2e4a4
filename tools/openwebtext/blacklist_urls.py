#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Leaves out addresses that lead to no prose, and keeps each page once.

python tools/openwebtext/blacklist_urls.py urls clean_urls.txt
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.line_job import run_tool
from megatron.apps.corpus.collection.urls import choose_urls


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("blacklist_urls.py", __doc__, choose_urls, argv, positional=("--input", "--output"))


if __name__ == "__main__":
    main()
