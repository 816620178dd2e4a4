#!/usr/bin/env python
"""Converts checkpoints to the forms of other projects, and from them.

    python tools/convert_checkpoint.py to-hf --load checkpoints --output hf
    python tools/convert_checkpoint.py from-hf --input hf --output checkpoints
    python tools/convert_checkpoint.py to-megatron --load checkpoints --output megatron
    python tools/convert_checkpoint.py to-universal --load checkpoints --output universal

What goes to or comes from Hugging Face is compared with what it was made of, logit by logit, before
it gets its name. tools/checkpoint/util.py turns any format into ours or into Megatron's.
"""

import sys
from collections.abc import Sequence
from pkgutil import resolve_name

from megatron.config import ConfigError

COMMANDS = {
    "to-hf": "megatron.formats.conversion.commands:to_hf",
    "from-hf": "megatron.formats.conversion.commands:from_hf",
    "to-megatron": "megatron.formats.conversion.commands:to_megatron",
    "to-universal": "megatron.formats.conversion.commands:to_universal",
}
"""Module and function of each command; it is imported when it is called."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else None
    if command in ("-h", "--help"):
        print((__doc__ or "").strip() + "\n\nCommands (each has --help): " + ", ".join(COMMANDS))
        return
    try:
        if command not in COMMANDS:
            raise ConfigError(f"{command or 'no command'}: the commands are {', '.join(COMMANDS)}")
        resolve_name(COMMANDS[command])(arguments)
    except (ValueError, OSError) as error:
        sys.exit(f"convert_checkpoint.py: error: {error}")


if __name__ == "__main__":
    main()
