#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Generates knowledge and answers of dialogues by prompting (MSDP), or evaluates them.

    python tasks/msdp/main.py --task MSDP-PROMPT --load checkpoints/gpt --prompt-type knowledge \
        --prompt-file prompts.json --sample-input-file test.txt --sample-output-file knowledge.txt

    python tasks/msdp/main.py --task MSDP-EVAL-F1 --guess-file knowledge.txt \
        --answer-file reference.txt
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from megatron.apps.msdp.prompting import run_msdp  # noqa: E402
from megatron.run.process import ending_process, errors_for_users  # noqa: E402


def main() -> None:
    """Parses the command line and runs the task."""
    with ending_process(), errors_for_users():
        run_msdp(__doc__)


if __name__ == "__main__":
    main()
