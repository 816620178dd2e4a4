#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Evaluates a checkpoint with EleutherAI's lm-evaluation-harness, without an export.

    python tools/evaluate.py --load checkpoints --tasks lambada_openai,hellaswag --batch-size 8

    torchrun --nproc-per-node 4 tools/evaluate.py --load checkpoints --tasks my_task \
        --include-path tasks --num-fewshot 5 --tensor-model-parallel-size 2 --output results.json

--load takes a checkpoint of this project, Hugging Face, Megatron or DeepSpeed; model and tokenizer
are the checkpoint's. The results are those of lm-eval's own hf model, on any layout. Flags that
lm-eval has too mean the same, and may be written with underscores. Nothing is downloaded unless
HF_DATASETS_OFFLINE=0 is set: tasks read files of this machine. Needs the extra "evaluate".
"""

import sys
from pathlib import Path

# lm-eval imports a package of this file's name, which must not be found in this folder.
_HERE = Path(__file__).resolve().parent
sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != _HERE]

from megatron.tasks.harness.command import run_evaluation  # noqa: E402
from megatron.training.run import ending_process, errors_for_users  # noqa: E402


def main() -> None:
    """Parses the command line and evaluates."""
    with ending_process(), errors_for_users():
        run_evaluation(__doc__)


if __name__ == "__main__":
    main()
