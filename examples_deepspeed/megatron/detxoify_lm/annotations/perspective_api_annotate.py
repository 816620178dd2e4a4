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

from megatron.apps.tasks.detoxify.annotate import run_annotation
from megatron.run.process import errors_for_users


def main() -> None:
    """Parses the command line and scores the texts."""
    with errors_for_users():
        run_annotation(__doc__)


if __name__ == "__main__":
    main()
