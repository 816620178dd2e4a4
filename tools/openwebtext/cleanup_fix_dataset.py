#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Filters and repairs documents by named tasks.

python tools/openwebtext/cleanup_fix_dataset.py --input-files clean.jsonl \
    --tasks remove_512 general_cleaning --output-path fixed
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.cleaning import fix
from megatron.apps.corpus.collection.line_job import run_tool


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("cleanup_fix_dataset.py", __doc__, fix, argv)


if __name__ == "__main__":
    main()
