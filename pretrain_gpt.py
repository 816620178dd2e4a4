# PYTHON_ARGCOMPLETE_OK
r"""Pretrain a GPT.

    deepspeed pretrain_gpt.py --deepspeed_config deepspeed_configs/ds_zero1.json \
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --data-path data/my-corpus_text_document --micro-batch-size 4 --global-batch-size 32 \
        --train-iters 1000 --lr 6e-4 --save checkpoints --load checkpoints

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
        train(parse_run(__doc__, family="gpt"))


if __name__ == "__main__":
    main()
