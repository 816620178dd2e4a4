#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Evaluates a GPT-2 with the flags of Megatron-LM's first release (2019): runs tasks/main.py.

    python scripts/run_gpt2_eval.py --model-path checkpoints/gpt2_345m --data-path wiki.test.tokens
    python scripts/run_gpt2_eval.py --model-path checkpoints/gpt2_345m --data-path lambada.jsonl \
        --cloze-eval
    python scripts/run_gpt2_eval.py --model-path checkpoints/gpt2_345m --data-path webtext.json \
        --webtext-eval --eval-iters 5000

Without --cloze-eval (LAMBADA) and --webtext-eval (loose JSON) the text is WikiText's. The
vocabulary, vocab.json and merges.txt of gpt2, is in --cache-dir; nothing is downloaded.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # a checkout that is not installed

from megatron.apps.tasks.command import Gpt2EvalConfig, run_task  # noqa: E402
from megatron.config import parse_configs  # noqa: E402
from megatron.run.process import ending_process, errors_for_users  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluates."""
    (options,) = parse_configs((Gpt2EvalConfig,), argv, description=__doc__)
    with ending_process(), errors_for_users():
        options.check()
        # The processes of --model-parallel-size are started by this name.
        sys.argv = [str(ROOT / "tasks" / "main.py"), *options.task_flags()]
        run_task(__doc__)


if __name__ == "__main__":
    main()
