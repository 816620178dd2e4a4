# PYTHON_ARGCOMPLETE_OK
r"""Pretrain a T5.

    deepspeed pretrain_t5.py --deepspeed_config deepspeed_configs/ds_zero1.json \
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 --kv-channels 64 \
        --ffn-hidden-size 3072 --encoder-seq-length 512 --decoder-seq-length 128 \
        --max-position-embeddings 512 --vocab-file bert-vocab.txt --vocab-extra-ids 100 \
        --data-path data/my-corpus_text_sentence --micro-batch-size 16 --global-batch-size 32 \
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
        train(parse_run(__doc__, family="t5"))


if __name__ == "__main__":
    main()
