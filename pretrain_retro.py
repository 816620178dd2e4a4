# PYTHON_ARGCOMPLETE_OK
r"""Pretrain a Retro: a GPT that also reads retrieved text.

    deepspeed pretrain_retro.py --deepspeed_config deepspeed_configs/ds_zero1.json \
        --retro-project-dir my-project --retro-add-retriever \
        --num-layers 12 --hidden-size 768 --num-attention-heads 12 \
        --max-position-embeddings 2048 --micro-batch-size 4 \
        --lr 6e-4 --save checkpoints --load checkpoints

The project is a folder of tools/retro/preprocess_data.py, whose config.json says data, tokenizer,
sequence length, seed, global batch size, number of samples and evaluations. Without
--retro-add-retriever the same command trains a GPT on the same samples. torchrun starts it in the
same way, and plain python runs it on one process.
"""

import megatron.util.collector
from megatron.run.process import ending_process, errors_for_users
from megatron.run.run import parse_run
from megatron.training.build import train

megatron.util.collector.resume()


def main() -> None:
    """Parses the command line, builds the model and its data, trains."""
    with ending_process(), errors_for_users():
        train(parse_run(__doc__, family="retro"))


if __name__ == "__main__":
    main()
