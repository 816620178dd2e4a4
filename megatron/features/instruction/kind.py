"""Instructions and answers as packed samples with a loss on the answers."""

from __future__ import annotations

from pathlib import Path

from megatron.config import ConfigError
from megatron.data.build import SourceReader
from megatron.data.indexed import idx_path
from megatron.data.pipeline import DataKind, DataPipeline
from megatron.data.sources import DataSource
from megatron.features.curriculum.flags import CurriculumConfig, sequence_lengths
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.examples import InstructionExamples
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.packing import InstructionRecipe


class Instruction(DataKind):
    """Files of instructions and answers instead of .bin/.idx."""

    def reader(self, data: DataPipeline) -> SourceReader:
        config = data.config.section(InstructionConfig)
        if sequence_lengths(data.config.section(CurriculumConfig)) is not None:
            raise ConfigError(
                "a curriculum of sequence lengths cuts samples, and would cut off the answers of "
                "instruction data: use one or the other"
            )
        recipe = InstructionRecipe.from_config(config, data.seq_length, data.seed, data.tokenizer)

        def open_examples(path: str, source: DataSource) -> InstructionExamples:
            if idx_path(path).is_file() and not Path(path).exists():
                raise ConfigError(
                    f"{path} is the prefix of a .bin and an .idx; --sft, and the type instruction, "
                    "read files of instructions and answers (JSON, JSON lines, Parquet, CSV)"
                )
            encoder = ExampleEncoder(config, data.tokenizer, data.config.tokenizer)
            return InstructionExamples.open(path, encoder, data.cache(path))

        return SourceReader(open_examples, recipe)


KIND = Instruction()
