#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Makes the database, the index and the neighbours of a Retro; see megatron/retro/command.py."""

from megatron.retro.command import main

if __name__ == "__main__":
    main()
