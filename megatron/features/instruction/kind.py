"""Instructions and answers as packed samples with a loss on the answers."""

from __future__ import annotations

from pathlib import Path

from megatron.config import ConfigError, RunConfig
from megatron.data.build import SourceReader
from megatron.data.indexed import idx_path
from megatron.data.pipeline import DataKind, DataPipeline, sequence_lengths
from megatron.data.sources import DataSource
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import Example, read_examples
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.examples import InstructionExamples, InstructionRecipe
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import example_files


class Instruction(DataKind):
    """Files of instructions and answers instead of .bin/.idx."""

    def reader(self, data: DataPipeline) -> SourceReader:
        config = data.config.section(InstructionConfig)
        if sequence_lengths(data.config).grows:
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

    def conversation(self, config: RunConfig, path: str) -> Example | None:
        columns = RecordColumns.of(config.section(InstructionConfig))
        examples = read_examples(example_files(path)[0].path, columns)
        return next((example for _, example in examples), None)


KIND = Instruction()
