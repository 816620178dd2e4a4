#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Converts checkpoints to and from the formats of other projects.

    python tools/convert_checkpoint.py to-hf --load checkpoints --output hf
    python tools/convert_checkpoint.py from-hf --input hf --output checkpoints
    python tools/convert_checkpoint.py to-megatron --load checkpoints --output megatron
    python tools/convert_checkpoint.py to-universal --load checkpoints --output universal
    python tools/convert_checkpoint.py to-peft --load checkpoints --output adapters

Conversions to and from Hugging Face are compared with their source, logit by logit, before the
result gets its name. Adapters of --lora are merged into their base, except by to-peft, which writes
them alone. tools/checkpoint/util.py converts any format to this project's or Megatron's.
"""

import sys
from collections.abc import Sequence

from megatron.config.command_line import run_command
from megatron.util.errors import end_with_reader, one_line

COMMANDS = {
    "to-hf": "megatron.formats.conversion.commands:to_hf",
    "from-hf": "megatron.formats.conversion.commands:from_hf",
    "to-megatron": "megatron.formats.conversion.commands:to_megatron",
    "to-universal": "megatron.formats.conversion.commands:to_universal",
    "to-peft": "megatron.formats.conversion.adapter_command:to_peft",
}
"""Module and function of each command; it is imported when it is called."""


def main(argv: Sequence[str] | None = None) -> None:
    try:
        run_command(COMMANDS, __doc__, argv)
    except (ValueError, OSError) as error:
        sys.exit(f"convert_checkpoint.py: error: {one_line(error)}")


if __name__ == "__main__":
    end_with_reader()
    main()
