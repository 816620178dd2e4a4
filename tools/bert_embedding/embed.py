#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Embeds texts with a BERT, or another encoder, into HDF5 files.

    python tools/bert_embedding/embed.py --input texts.jsonl --output vectors \
        --bert-embedder-type huggingface --bert-load bert-large-cased

    torchrun --nproc-per-node 4 tools/bert_embedding/embed.py --input texts.txt --output vectors \
        --bert-load checkpoints/bert --vocab-file vocab.txt \
        --tokenizer-type BertWordPieceLowerCase

Each file START-END.hdf5 has the vectors of a block of texts as "data", float32 [texts, width], in
the order of the texts. What was killed continues where it was when it is started again. Needs the
extra "retro".
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from megatron.apps.retro.embedding.disk import run_embedding  # noqa: E402
from megatron.run.process import ending_process, errors_for_users  # noqa: E402


def main() -> None:
    """Parses the command line and embeds."""
    with ending_process(), errors_for_users():
        run_embedding(__doc__)


if __name__ == "__main__":
    main()
