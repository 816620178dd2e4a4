#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Scores continuations of prompts; Expected Maximum Toxicity and Toxicity Probability.

    python examples_deepspeed/megatron/detxoify_lm/perspective_api.py \
        --data-path continuations.jsonl --prompt-path prompts.jsonl \
        --scorer profanity-check --output measures.json
"""

from detoxifying.measures import run_measures

from megatron.run.process import errors_for_users


def main() -> None:
    """Parses the command line and scores and measures."""
    with errors_for_users():
        run_measures(__doc__)


if __name__ == "__main__":
    main()
