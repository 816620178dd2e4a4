"""Files of instructions and answers as the samples of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.config import ConfigError
from megatron.config.curriculum import sequence_lengths
from megatron.data.build import Kind
from megatron.data.indexed import idx_path
from megatron.data.instruction.encode import ExampleEncoder
from megatron.data.instruction.examples import InstructionExamples
from megatron.data.instruction.recipe import InstructionRecipe
from megatron.data.run_data import RunData
from megatron.data.samples import SampleRecipe
from megatron.data.sources import Source


def kind(data: RunData, recipe: SampleRecipe[Any] | None = None) -> Kind:
    """Examples with a recipe of their own.

    Raises:
        ConfigError: flags contradict each other or the tokenizer.
    """
    assert recipe is None
    config = data.config
    if sequence_lengths(config.curriculum) is not None:
        raise ConfigError(
            "a curriculum of sequence lengths cuts samples, and so the answers off instruction "
            "data: give one or the other"
        )
    examples = InstructionRecipe.from_config(
        config.instruction, data.seq_length, data.seed, data.tokenizer
    )

    def open_examples(path: str, source: Source) -> InstructionExamples:
        if idx_path(path).is_file() and not Path(path).exists():
            raise ConfigError(
                f"{path} is the prefix of a .bin and an .idx; --sft, and the type instruction, "
                "read files of instructions and answers (JSON or JSON lines)"
            )
        encoder = ExampleEncoder(config.instruction, data.tokenizer, config.tokenizer)
        return InstructionExamples.open(path, encoder, data.cache(path))

    return Kind(open_examples, examples)
