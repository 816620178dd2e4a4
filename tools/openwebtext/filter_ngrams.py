#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Takes out of a corpus what it shares with evaluation sets.

python tools/openwebtext/filter_ngrams.py --tasks lambada --lambada-path lambada.jsonl \
    --dedup-dataset unique.jsonl text --output decontaminated.jsonl
"""

from collections.abc import Sequence

from megatron.corpus.collection.command import run_tool
from megatron.corpus.collection.decontamination import FilterConfig, filter_ngrams
from megatron.corpus.collection.job import RunConfig


def main(argv: Sequence[str] | None = None) -> None:
    run_tool(
        "filter_ngrams.py",
        __doc__,
        (FilterConfig, RunConfig),
        filter_ngrams,
        argv,
    )


if __name__ == "__main__":
    main()
