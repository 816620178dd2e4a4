#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Generates texts from a training checkpoint, as tools/generate.py does.

    python examples_deepspeed/megatron/detxoify_lm/generate_samples_gpt.py --load checkpoints \
        --num-samples 1000 --genfile samples.out --out-seq-length 1000 --top_p 0.9

    python examples_deepspeed/megatron/detxoify_lm/generate_samples_gpt.py --load checkpoints \
        --sample-input-file prompts.jsonl --sample-output-file continuations.jsonl \
        --out-seq-length 20 --top_p 0.9
"""

from megatron.apps.generation.generation.command import run_generation
from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and generates."""
    with ending_process(), errors_for_users(outlives_output=False):
        run_generation(__doc__)


if __name__ == "__main__":
    main()
