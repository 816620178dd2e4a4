#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""tasks/main.py of Megatron-LM: runs megatron/apps/tasks/command.py."""

from megatron.apps.tasks.command import __doc__, main  # noqa: F401

if __name__ == "__main__":
    main()
