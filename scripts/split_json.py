#!/usr/bin/env python
r"""Shuffles a corpus into train.json, dev.json and test.json, as in Megatron-LM's first release.

    python scripts/split_json.py --input_files corpus.json --output_dir parts \
        --test_percent 0.05 0

tools/split_json.py keeps equal texts in one part, and the order of the documents.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # a checkout that is not installed

from megatron.apps.corpus.collection.line_job import run_tool  # noqa: E402
from megatron.apps.corpus.collection.reshaping import shuffled_split  # noqa: E402


def main() -> None:
    """The command."""
    run_tool("split_json.py", __doc__, shuffled_split, None)


if __name__ == "__main__":
    main()
