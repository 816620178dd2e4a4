#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""The main job from end to end, on text that every Python installation carries.

    python tools/quickstart.py

Trains a tokenizer and a small GPT on the source files of Python's standard library, stops in the
middle and resumes, measures the validation loss, exports to Hugging Face, and generates text there.
Every step is a command that you could type, shown before it runs. A second run does only what has
changed.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.config import ConfigError, parse_configs
from megatron.config.flags import option
from megatron.quickstart import recipe
from megatron.quickstart.corpus import standard_library, write_corpus
from megatron.quickstart.measure import HeldOut, held_out
from megatron.quickstart.recipe import Places
from megatron.quickstart.steps import Chain, StepFailed, say
from megatron.training.plots import plot_loss


@dataclass(frozen=True)
class QuickstartConfig:
    """Quickstart: where, on what, how long."""

    output: str = option("runs/quickstart")
    """Folder for everything."""
    sources: str | None = option(None, derived="this Python's standard library")
    """Folder of the Python files to train on."""
    train_iters: int = option(640)
    """Optimizer steps; half of them before the stop, half after it."""
    fresh: bool = option(False)
    """Start over: remove what --output holds."""

    def check(self) -> None:
        """Finds what cannot run.

        Raises:
            ConfigError: a flag is out of range, or this is not the checkout.
        """
        if self.train_iters < 2 or self.train_iters % 2:
            raise ConfigError(f"--train-iters {self.train_iters} must be even and positive")
        if not Path("pretrain_gpt.py").is_file():
            raise ConfigError(f"{Path.cwd()} holds no pretrain_gpt.py: run this in the checkout")


def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_configs((QuickstartConfig,), argv, description=__doc__)
    try:
        config.check()
        run(config)
    except (ValueError, OSError, StepFailed) as error:
        sys.exit(f"quickstart.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit("quickstart.py: interrupted; run it again to go on from the last finished step")


def run(config: QuickstartConfig) -> None:
    """All steps, from source files to generated text.

    Raises:
        StepFailed: a command failed.
    """
    places = Places(Path(config.output))
    if config.fresh:
        remove(places)
    chain = begin(places, Path(config.sources) if config.sources else standard_library())
    chain.run(recipe.tokenizer_step(places))
    chain.run(recipe.data_step(places))
    reference = held_out(places.prefix, places.corpus, recipe.SPLIT, recipe.VOCAB_SIZE)
    command = recipe.train_command(places, config.train_iters, reference)
    chain.run(recipe.train_step(places, command, config.train_iters // 2))
    chain.run(recipe.resume_step(places, command, config.train_iters))
    chain.run(recipe.export_step(places))
    chain.run(recipe.generate_step(places))
    report(places, reference)


def remove(places: Places) -> None:
    """Removes what an earlier quickstart made, and refuses a folder that is something else."""
    if not places.folder.exists():
        return
    if not places.stamps.is_dir():
        raise ConfigError(f"--output {places.folder} is no folder of a quickstart: not removed")
    shutil.rmtree(places.folder)


def begin(places: Places, sources: Path) -> Chain:
    """Writes the corpus, with which the chain of commands starts."""
    say("corpus")
    corpus = write_corpus(places.corpus, sources)
    print(
        f"{corpus.path}: {corpus.documents} Python files, {corpus.text_bytes / 1e6:.1f} MB, "
        f"from {sources}"
    )
    return Chain(places.stamps, corpus.digest)


def report(places: Places, reference: HeldOut) -> None:
    """Draws the losses and says in one line what came out.

    The unigram entropy is the cross entropy of the validation tokens under the frequencies of the
    training tokens: what a model without any context would reach.
    """
    rows = [json.loads(line) for line in places.metrics.read_text().splitlines()]
    last = [row for row in rows if row["kind"] == "validation"][-1]
    loss, tokens = last["loss"], last["consumed_tokens"]
    plot_loss(
        places.metrics,
        places.picture,
        unigram_entropy=reference.unigram_entropy,
        title="A small GPT on the source files of Python's standard library",
    )
    say(f"losses over tokens: {places.picture}")
    print(
        f"quickstart: validation loss {loss:.2f} (unigram {reference.unigram_entropy:.2f}, bits "
        f"per byte {reference.bits_per_byte(loss):.2f}), {tokens / 1e6:.1f}M tokens, exported to "
        f"{places.hf}",
        flush=True,
    )


if __name__ == "__main__":
    main()
