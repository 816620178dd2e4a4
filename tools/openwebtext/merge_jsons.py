#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Puts JSON-lines files together.

python tools/openwebtext/merge_jsons.py --json-path folder --output-file merged.jsonl
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.line_job import run_tool
from megatron.apps.corpus.collection.reshaping import merge


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("merge_jsons.py", __doc__, merge, argv)


if __name__ == "__main__":
    main()
