#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
r"""Translates the configuration of another trainer into a command of this one.

    python tools/migrate.py configs/125M.yml configs/local_setup.yml
    python tools/migrate.py pretrain_gpt_345m.sh --set DATA_PATH=my-corpus_text_document
    python tools/migrate.py llama3_8b.toml --processes 8 --output migrated

FILE is a script of Megatron-LM or Megatron-DeepSpeed, GPT-NeoX's YAML files, a YAML file of
nanotron, axolotl or LLaMA-Factory, a TOML file of torchtitan, or a script that starts run_clm.py
with transformers' Trainer and a DeepSpeed JSON. Nothing of it is run. Printed are the command, a
DeepSpeed JSON where one is needed, and a line for each key: translated, not needed and why, or
without a counterpart. The command is checked as a run does it, without data and checkpoints.

Exit status: 0 if every key has a counterpart or needs none, 1 if some have none or are unknown, 2
if the file cannot be read, or a run would refuse the command.
"""

import sys
from collections.abc import Sequence

from megatron.apps.migration.command import TRAINERS, markdown, run
from megatron.config import ConfigError
from megatron.config.command_line import CommandParser
from megatron.run.process import errors_for_users


def main(argv: Sequence[str] | None = None) -> None:
    parser = CommandParser(__doc__, usage="%(prog)s FILE [FILE ...] [flags]")
    parser.add_argument("files", nargs="*", metavar="FILE", help="configuration of another trainer")
    parser.add_argument(
        "--from", dest="trainer", choices=tuple(TRAINERS), metavar="NAME",
        help=f"trainer whose file it is, where that is not seen: {', '.join(TRAINERS)}",
    )  # fmt: skip
    parser.add_argument(
        "--processes", type=int, metavar="INT",
        help="number of processes to check the command with (default: as the file says)",
    )  # fmt: skip
    parser.add_argument(
        "--set", dest="variables", nargs="+", default=[], metavar="NAME=VALUE",
        help="variables of a script, and its positions by number, that replace its own",
    )  # fmt: skip
    parser.add_argument(
        "--output", metavar="FOLDER", help="folder to write run.sh and the DeepSpeed JSON to"
    )
    parser.add_argument(
        "--table", choices=tuple(TRAINERS), metavar="NAME",
        help="print what is done with the keys of a trainer, as a table in Markdown",
    )  # fmt: skip
    args = parser.parse_args(argv)
    with errors_for_users():
        if args.table:
            print(markdown(args.table), end="")
            return
        if not args.files:
            raise ConfigError("FILE is missing: the configuration of another trainer")
        pairs = [pair.partition("=") for pair in args.variables]
        if wrong := [name for name, sign, _ in pairs if not sign]:
            raise ConfigError(f"--set {wrong[0]}: expected NAME=VALUE")
        if args.processes is not None and args.processes < 1:
            raise ConfigError(f"--processes {args.processes} must be positive")
        variables = {name: value for name, _, value in pairs}
        sys.exit(0 if run(args.files, args.trainer, args.processes, variables, args.output) else 1)


if __name__ == "__main__":
    main()
