r"""Evaluates a model, or fine-tunes it for a task.

    python tasks/main.py --task WIKITEXT103 --valid-data wikitext-103/wiki.test.tokens \
        --load checkpoints --micro-batch-size 8

    python tasks/main.py --task LAMBADA --strict-lambada --valid-data lambada_test.jsonl \
        --load checkpoints --micro-batch-size 8

--load takes a checkpoint of this project, Hugging Face, Megatron or DeepSpeed. Model and tokenizer
are the checkpoint's unless --num-layers is given. torchrun and deepspeed start several processes;
the results are the same for every layout.
"""

from megatron.tasks.command import run_task
from megatron.training.run import ending_process, errors_for_users


def main() -> None:
    """Parses the command line and runs the task."""
    with ending_process(), errors_for_users():
        run_task(__doc__)


if __name__ == "__main__":
    main()
