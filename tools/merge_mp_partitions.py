#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Megatron-LM's program that merges the tensor-parallel partitions of a checkpoint into one.

    python tools/merge_mp_partitions.py --model-type BERT --tensor-model-parallel-size 2 \
        --tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt --num-layers 24 \
        --hidden-size 1024 --num-attention-heads 16 --seq-length 512 \
        --max-position-embeddings 512 --load checkpoints/bert_345m

It reads any format and writes Megatron's old layout for one tensor-parallel process, in the folder
--save (by default LOAD/merged). Sizes of the model may be left out: they are compared with the
checkpoint's. Training does not need it: --load takes a checkpoint of any layout.
"""

from megatron.formats.conversion.megatron_programs import merge
from megatron.run.process import errors_for_users


def main() -> None:
    """Parses the command line and merges."""
    with errors_for_users():
        merge(__doc__)


if __name__ == "__main__":
    main()
