#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Converts checkpoints to and from the formats of other projects.

    python tools/convert_checkpoint.py to-hf --load checkpoints --output hf
    python tools/convert_checkpoint.py from-hf --input hf --output checkpoints
    python tools/convert_checkpoint.py to-megatron --load checkpoints --output megatron
    python tools/convert_checkpoint.py to-deepspeed --load checkpoints --output deepspeed
    python tools/convert_checkpoint.py to-universal --load checkpoints --output universal
    python tools/convert_checkpoint.py to-torch-dist --load checkpoints --output core
    python tools/convert_checkpoint.py to-dcp --load checkpoints --output dcp
    python tools/convert_checkpoint.py to-gguf --load checkpoints --output model.gguf
    python tools/convert_checkpoint.py to-peft --load checkpoints --output adapters
    python tools/convert_checkpoint.py clean --load quantized --output clean
    python tools/convert_checkpoint.py upcycle --load dense --output experts --num-experts 8

Conversions to and from Hugging Face are compared with their source, logit by logit, before the
result gets its name. Adapters of --lora are merged into their base, except by to-peft, which writes
them alone. tools/checkpoint/util.py converts any format to this project's or Megatron's.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.config import ConfigError
from megatron.config.command_line import CommandParser
from megatron.config.features import features
from megatron.formats import COMMANDS
from megatron.util.errors import one_line


def main(argv: Sequence[str] | None = None) -> None:
    commands = dict(COMMANDS)
    for feature in features().values():
        commands |= feature.conversions()
    try:
        run_command(commands, __doc__, argv)
    except (ValueError, OSError) as error:
        sys.exit(f"convert_checkpoint.py: error: {one_line(error)}")


def run_command(
    commands: Mapping[str, Callable[[], Callable[[Sequence[str]], None]]],
    description: str | None,
    argv: Sequence[str] | None = None,
) -> None:
    """Calls the command that the first word names with the words that follow. ``commands`` import
    the function of each when it is called. Raises what the command raises."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = CommandParser(description, usage="%(prog)s COMMAND [flags]")
    parser.add_argument(
        "command", choices=tuple(commands), metavar="COMMAND",
        help=f"{', '.join(commands)}; each has --help",
    )  # fmt: skip
    command = _completed_command(commands)
    if command is not None:
        words = [command]
    elif not words or words[0] not in commands:
        if words and words[0].startswith("-"):
            parser.parse_args(words)
        parser.complete()
        raise ConfigError(
            f"{words[0] if words else 'no command'}: the commands are {', '.join(commands)}"
        )
    commands[words[0]]()(words[1:])


def _completed_command(commands: Iterable[str]) -> str | None:
    start = int(os.environ.get("_ARGCOMPLETE", "0"))
    words = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))].split(" ")
    words = [word for word in words[:-1] if word]
    return words[start] if 0 < start < len(words) and words[start] in commands else None


if __name__ == "__main__":
    main()
