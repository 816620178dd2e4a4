#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Megatron-DeepSpeed's evaluation with lm-evaluation-harness: tools/evaluate.py by its name.

    deepspeed tasks/eval_harness/evaluate.py --load checkpoints --task_list lambada,wikitext \
        --include_path data --results_path results.json --micro-batch-size 12 \
        --adaptive_seq_len --eval_fp32 --num_fewshot 0

--task_list has the names of lm-eval 0.2, and the file of --results_path its form. Model and
tokenizer are the checkpoint's: sizes of -1 mean nothing. TASK=FILE, or a file TASK*.jsonl in
--include_path, gives the documents of a task; nothing is downloaded unless HF_DATASETS_OFFLINE=0 is
set. Several processes share the requests. Needs the extra "evaluate".
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from megatron.apps.tasks.harness.command import run_evaluation  # noqa: E402
from megatron.run.process import ending_process, errors_for_users  # noqa: E402


def main() -> None:
    """Parses the command line and evaluates."""
    with ending_process(), errors_for_users():
        run_evaluation(__doc__)


if __name__ == "__main__":
    main()
