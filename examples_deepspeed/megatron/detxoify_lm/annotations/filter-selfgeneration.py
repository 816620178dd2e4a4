#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Keeps the least toxic half of scored texts.

    python examples_deepspeed/megatron/detxoify_lm/annotations/filter-selfgeneration.py \
        --data-path samples.annotated.out --out-path samples.nontoxic.out
"""

from megatron.apps.tasks.detoxify.measures import run_filter
from megatron.run.process import errors_for_users


def main() -> None:
    """Parses the command line and filters."""
    with errors_for_users(outlives_output=False):
        run_filter(__doc__)


if __name__ == "__main__":
    main()
