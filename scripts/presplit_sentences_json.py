#!/usr/bin/env python
"""Puts each sentence of a text on a line of its own, as in Megatron-LM's first release.

python scripts/presplit_sentences_json.py corpus.json corpus_sentences.json
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a checkout that is not installed

from megatron.apps.corpus.collection.line_job import run_tool  # noqa: E402
from megatron.apps.corpus.collection.reshaping import presplit  # noqa: E402


def main() -> None:
    """The command."""
    flags = ("--input", "--output")
    run_tool("presplit_sentences_json.py", __doc__, presplit, None, positional=flags)


if __name__ == "__main__":
    main()
