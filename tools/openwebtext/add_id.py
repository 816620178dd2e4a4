#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Gives each document an id.

python tools/openwebtext/add_id.py --input-file a.jsonl --output-file b.jsonl --id-prefix owt
"""

from collections.abc import Sequence

from megatron.apps.corpus.collection.line_job import run_tool
from megatron.apps.corpus.collection.reshaping import add_ids


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("add_id.py", __doc__, add_ids, argv)


if __name__ == "__main__":
    main()
