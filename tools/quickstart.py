#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""The whole workflow from end to end, on text that every Python installation has.

    python tools/quickstart.py

Trains a tokenizer and a small GPT on the source files of Python's standard library, stops in the
middle and resumes, measures the validation loss, exports to Hugging Face, and generates text with
transformers. Every command is printed before it runs and can be typed by hand. A second run repeats
only what has changed.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # the root of this checkout

from megatron.apps.pictures.plots import plot_loss  # noqa: E402
from megatron.apps.quickstart.commands import (  # noqa: E402
    SPLIT,
    VOCAB_SIZE,
    CommandChain,
    CommandFailed,
    QuickstartFolder,
    data_commands,
    in_checkout_folder,
    installed,
    say,
    training_commands,
)
from megatron.apps.quickstart.corpus import HeldOut, held_out, standard_library, write_corpus  # noqa: E402
from megatron.config import ConfigError, parse_configs  # noqa: E402
from megatron.config.flags import option  # noqa: E402
from megatron.util.errors import one_line  # noqa: E402


@dataclass(frozen=True)
class QuickstartConfig:
    """Quickstart: its folder, its text, its length."""

    output: str = option("runs/quickstart")
    """Folder for all files."""
    sources: str | None = option(None, derived="this Python's standard library")
    """Folder of the Python files to train on."""
    train_iters: int = option(640)
    """Optimizer steps, half of them before the stop and half after it."""
    fresh: bool = option(False)
    """Start over: remove the files in --output."""

    def check(self) -> None:
        """Checks the flags and the folder.

        Raises:
            ConfigError: a flag is out of range.
        """
        if self.train_iters < 2 or self.train_iters % 2:
            raise ConfigError(f"--train-iters {self.train_iters} must be even and positive")


def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_configs((QuickstartConfig,), argv, description=__doc__)
    try:
        config.check()
        run(config)
    except (ValueError, OSError, CommandFailed) as error:
        sys.exit(f"quickstart.py: error: {one_line(error)}")
    except KeyboardInterrupt:
        sys.exit(
            "quickstart.py: interrupted; run it again to continue after the last finished command"
        )


def run(config: QuickstartConfig) -> None:
    """All commands, from source files to generated text.

    Raises:
        CommandFailed: a command failed.
    """
    at = QuickstartFolder(Path(config.output))
    if config.fresh:
        remove(at)
    say("corpus")
    sources = Path(config.sources) if config.sources else standard_library()
    corpus = write_corpus(at.corpus, sources)
    print(
        f"{corpus.path}: {corpus.documents} Python files, {corpus.text_bytes / 1e6:.1f} MB, "
        f"from {sources}"
    )
    chain = CommandChain(at.stamps, corpus.digest)
    typed = in_checkout_folder()
    for command in data_commands(at):
        chain.run(command if typed else installed(command))
    reference = held_out(at.prefix, at.corpus, SPLIT, VOCAB_SIZE)
    for command in training_commands(at, config.train_iters, reference):
        chain.run(command if typed else installed(command))
    report(at, reference)


def remove(at: QuickstartFolder) -> None:
    """Removes the files of an earlier quickstart; refuses any other folder."""
    if not at.folder.exists():
        return
    if not at.stamps.is_dir():
        raise ConfigError(f"--output {at.folder} is not a folder of a quickstart: not removed")
    shutil.rmtree(at.folder)


def report(at: QuickstartFolder, reference: HeldOut) -> None:
    """Draws the losses and prints the result in one line."""
    rows = [json.loads(line) for line in at.metrics.read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "validation"][-1]
    loss, tokens = last["loss"], last["consumed_tokens"]
    plot_loss(
        at.metrics,
        at.picture,
        unigram_entropy=reference.unigram_entropy,
        title="A small GPT on the source files of Python's standard library",
    )
    say(f"losses over tokens: {at.picture}")
    print(
        f"quickstart: validation loss {loss:.2f} (unigram {reference.unigram_entropy:.2f}, bits "
        f"per byte {reference.bits_per_byte(loss):.2f}), {tokens / 1e6:.1f}M tokens, exported to "
        f"{at.hf}",
        flush=True,
    )


if __name__ == "__main__":
    main()
