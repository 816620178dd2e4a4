#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Gives each document an id.

python tools/openwebtext/add_id.py --input-file a.jsonl --output-file b.jsonl --id-prefix owt
"""

from collections.abc import Sequence

from megatron.corpus.collection.line_job import run_tool
from megatron.corpus.collection.reshaping import add_ids
from megatron.util.errors import end_with_reader


def main(argv: Sequence[str] | None = None) -> None:
    run_tool("add_id.py", __doc__, add_ids, argv)


if __name__ == "__main__":
    end_with_reader()
    main()
