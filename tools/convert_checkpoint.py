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

import sys
from collections.abc import Sequence

from megatron.config.command_line import run_command
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


if __name__ == "__main__":
    main()
