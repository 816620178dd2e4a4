#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Makes the database, the index and the neighbours of a Retro.

    python tools/retro/preprocess_data.py --retro-project-dir retro --retro-tasks build \
        --data-path data/my-corpus_text_document --split 98,2,0 \
        --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json \
        --merge-file gpt2-merges.txt --seq-length 512 --train-samples 100000 \
        --global-batch-size 256 --eval-interval 1000 --eval-iters 10 --bert-embedder-type hashing

torchrun and deepspeed start several processes, on one node or several that share the folder. What
was killed continues where it was when it is started again. Needs the extra "retro".
"""

from megatron.apps.retro.command import run_preprocessing
from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and runs the tasks."""
    with ending_process(), errors_for_users():
        run_preprocessing(__doc__)


if __name__ == "__main__":
    main()
