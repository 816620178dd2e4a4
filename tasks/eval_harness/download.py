#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Downloads the data of lm-evaluation-harness's tasks, for evaluations without a network.

    python tasks/eval_harness/download.py --task_list lambada,wikitext,hellaswag

They are kept in the folder of HF_HOME. Needs the extra "evaluate".
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a checkout that is not installed

from megatron.apps.tasks.harness.command import run_download  # noqa: E402
from megatron.run.process import ending_process, errors_for_users  # noqa: E402


def main() -> None:
    """Parses the command line and downloads."""
    with ending_process(), errors_for_users():
        run_download(__doc__)


if __name__ == "__main__":
    main()
