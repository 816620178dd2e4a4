#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Puts JSON-lines files together.

python tools/openwebtext/merge_jsons.py --json-path folder --output-file merged.jsonl
"""

from collections.abc import Sequence

from megatron.corpus.collection.command import run_tool
from megatron.corpus.collection.job import RunConfig
from megatron.corpus.collection.numbering import MergeConfig, merge


def main(argv: Sequence[str] | None = None) -> None:
    run_tool(
        "merge_jsons.py",
        __doc__,
        (MergeConfig, RunConfig),
        merge,
        argv,
    )


if __name__ == "__main__":
    main()
