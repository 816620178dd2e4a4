# PYTHON_ARGCOMPLETE_OK
r"""Pretrain a retriever by the inverse cloze task (ICT).

    deepspeed pretrain_ict.py --deepspeed_config deepspeed_configs/ds_zero1.json \
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 256 \
        --vocab-file bert-vocab.txt --data-path wikipedia_text_sentence \
        --titles-data-path wikipedia_title_sentence --bert-load checkpoints/bert \
        --micro-batch-size 32 --train-iters 1000 --lr 1e-4 --save ict --load ict

torchrun starts it in the same way, and plain python runs it on one process.
"""

import megatron.util.collector
from megatron.run.process import ending_process, errors_for_users
from megatron.run.run import parse_run
from megatron.training.build import train

megatron.util.collector.resume()


def main() -> None:
    """Parses the command line, builds the model and its data, trains."""
    with ending_process(), errors_for_users():
        train(parse_run(__doc__, family="biencoder"))


if __name__ == "__main__":
    main()
