#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Shows what a Retro project contains.

    python tools/retro/cli.py --retro-project-dir retro
    python tools/retro/cli.py --retro-project-dir retro --part valid --sample 3 --chunk 5

Prints the project's configuration and sizes, or the chunks of a sample with the text of their
neighbours and where it is from. An interactive Python has the same:

    from tools.retro.cli import retro
    retro.init("retro")
    retro.get_db_num_chunks()
    retro.get_pt_sample("train", 3)
    retro.print_neighbor_texts(3, 5)
"""

from megatron.apps.retro.inspection import RetroInspector, run_inspection
from megatron.run.process import errors_for_users

retro = RetroInspector()
"""For an interactive Python."""


def main() -> None:
    """Parses the command line and prints."""
    with errors_for_users(outlives_output=False):
        run_inspection(__doc__)


if __name__ == "__main__":
    main()
