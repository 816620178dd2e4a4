#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Turns WikiExtractor's folders into one JSON object per article.

python tools/wikiextractor_json.py --input extracted --output wikipedia.jsonl
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.line_job import run_tool
from megatron.apps.corpus.collection.wikipedia import read_wikipedia


def main(argv: Sequence[str] | None = None) -> None:
    run_tool(
        "wikiextractor_json.py", __doc__, read_wikipedia, argv, positional=("--input", "--output")
    )


if __name__ == "__main__":
    main()
