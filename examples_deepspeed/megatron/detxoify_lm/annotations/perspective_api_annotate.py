#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Scores how toxic the texts of a file are.

    export PERSPECTIVE_API_KEY=...
    python examples_deepspeed/megatron/detxoify_lm/annotations/perspective_api_annotate.py \
        --data-path samples.out --out-path samples.annotated.out --workers 70 \
        --queries-per-second 50

    python examples_deepspeed/megatron/detxoify_lm/annotations/perspective_api_annotate.py \
        --data-path samples.out --out-path samples.annotated.out --scorer profanity-check

A command that was interrupted continues when it is started again.
"""

import sys
from pathlib import Path

from megatron.run.process import errors_for_users

sys.path.insert(0, str(Path(__file__).parents[1]))
from detoxifying.annotate import run_annotation  # noqa: E402


def main() -> None:
    """Parses the command line and scores the texts."""
    with errors_for_users():
        run_annotation(__doc__)


if __name__ == "__main__":
    main()
