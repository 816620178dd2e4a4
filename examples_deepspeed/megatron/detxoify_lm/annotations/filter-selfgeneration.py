#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Keeps the least toxic half of scored texts.

    python examples_deepspeed/megatron/detxoify_lm/annotations/filter-selfgeneration.py \
        --data-path samples.annotated.out --out-path samples.nontoxic.out
"""

import sys
from pathlib import Path

from megatron.run.process import errors_for_users

sys.path.insert(0, str(Path(__file__).parents[1]))
from detoxifying.measures import run_filter  # noqa: E402


def main() -> None:
    """Parses the command line and filters."""
    with errors_for_users(outlives_output=False):
        run_filter(__doc__)


if __name__ == "__main__":
    main()
