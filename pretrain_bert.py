# PYTHON_ARGCOMPLETE_OK
r"""Pretrain a BERT.

    deepspeed pretrain_bert.py --deepspeed_config deepspeed_configs/ds_zero1.json \
        --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \
        --vocab-file bert-vocab.txt --data-path my-bert_text_sentence \
        --micro-batch-size 4 --global-batch-size 32 \
        --train-iters 1000 --lr 1e-4 --save checkpoints --load checkpoints

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
        train(parse_run(__doc__, family="bert"))


if __name__ == "__main__":
    main()
