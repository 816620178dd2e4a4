#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Continues the training of a GPT on other data than it is evaluated on.

    python examples_deepspeed/megatron/detxoify_lm/finetune_gpt.py --load checkpoints --finetune \
        --no-load-optim --data-path nontoxic_text_document --split 100,0,0 \
        --data-path2 corpus_text_document --save detoxified --lr 2e-5 \
        --lr-decay-style constant --micro-batch-size 4 --global-batch-size 512 --train-iters 78

It takes all flags of pretrain_gpt.py, and is started as that is.
"""

from detoxifying.fine_tuning import fine_tune

from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and trains."""
    with ending_process(), errors_for_users():
        fine_tune(__doc__)


if __name__ == "__main__":
    main()
