#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Takes out of a corpus what it shares with evaluation sets.

python tools/openwebtext/filter_ngrams.py --tasks lambada --lambada-path lambada.jsonl \
    --dedup-dataset unique.jsonl text --output decontaminated.jsonl
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.decontamination import filter_ngrams
from megatron.apps.corpus.collection.line_job import run_tool


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("filter_ngrams.py", __doc__, filter_ngrams, argv)


if __name__ == "__main__":
    main()
