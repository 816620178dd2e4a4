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

from megatron.apps.tasks.harness.command import run_evaluation
from megatron.run.process import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and evaluates."""
    with ending_process(), errors_for_users():
        run_evaluation(__doc__)


if __name__ == "__main__":
    main()
