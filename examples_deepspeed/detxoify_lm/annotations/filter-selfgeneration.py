#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Keeps the least toxic half of scored texts.

    python examples_deepspeed/detxoify_lm/annotations/filter-selfgeneration.py \
        --data-path samples.annotated.out --out-path samples.nontoxic.out
"""

from megatron.tasks.detoxify.filtering import run_filter
from megatron.training.run import errors_for_users

if __name__ == "__main__":
    with errors_for_users():
        run_filter(__doc__)
