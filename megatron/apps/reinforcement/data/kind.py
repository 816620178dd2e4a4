"""Data kind of reinforcement learning: files of prompts instead of .bin/.idx files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from megatron.apps.reinforcement.data.prompts import (
    PromptBatch,
    PromptExamples,
    PromptRecipe,
    PromptSample,
    RepeatedPrompts,
    collate_prompts,
    read_prompts,
)
from megatron.apps.reinforcement.flags import ReinforcementConfig
from megatron.config import ConfigError, RunConfig
from megatron.data.build import SourceReader
from megatron.data.pipeline import BatchSizes, DataPipeline
from megatron.data.sampler import parse_skipped
from megatron.data.samples import SampleDataset, SampleView, bracketed, segments_of
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import ANSWER, Example, Turn
from megatron.features.instruction.examples import RecordFiles
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import example_files


class PromptFiles(RecordFiles):
    """Data kind for files of prompts instead of .bin/.idx. A training sample is a prompt for one
    completion, and each prompt is repeated ``--num-generations`` times. Held-out prompts are
    answered once."""

    flag, contents = "--rl", "prompts"

    def reader(self, data: DataPipeline) -> SourceReader:
        options = data.config.section(ReinforcementConfig)
        instruction = data.config.section(InstructionConfig)
        if options.rl is None:
            raise ConfigError(
                "data of the type prompts need --rl, the algorithm that they are trained by"
            )
        group = _group(data.config)
        for numbers in parse_skipped(data.config.data.skip_samples):
            if numbers.start % group or numbers.stop % group:
                raise ConfigError(
                    f"--skip-samples {' '.join(data.config.data.skip_samples)} divides the "
                    f"{group} texts of a prompt (--num-generations {group}): begin and end at "
                    "multiples of it"
                )
        longest = data.seq_length - options.max_completion_length
        recipe = PromptRecipe(
            min(longest, options.max_prompt_length or longest),
            data.seed,
            instruction.split_by == "prompt",
            instruction.on_long_example == "skip",
        )

        return self.records(data, recipe, PromptExamples.open)

    def needed(self, config: RunConfig, num_samples: int) -> int:
        return -(-num_samples // _group(config))

    def order(
        self,
        data: DataPipeline,
        train: SampleDataset[Any],
        num_samples: int,
        batch_sizes: BatchSizes,
    ) -> RepeatedPrompts:
        return RepeatedPrompts(train, _group(data.config))

    def conversation(self, config: RunConfig, path: str) -> Example | None:
        """Return the first prompt as a conversation with an empty answer, or None if there is no
        prompt."""
        columns = RecordColumns.of(config.section(InstructionConfig))
        for _, record in islice(read_prompts(example_files(path)[0].path, columns), 1):
            example = record.example
            return Example((*example.turns, Turn(ANSWER, "")), False, example.variables)
        return None

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> Callable[[Sequence[Any]], PromptBatch]:
        if data.config.data.mock_data:
            raise ConfigError("--mock-data has no prompts: name files, or leave --rl out")
        return collate_prompts

    def views(self, data: DataPipeline, sample: PromptSample) -> list[SampleView] | None:
        """Return a view of the prompt, in which no token counts in the loss."""
        tokens = sample.prompt.tokens
        counted = np.zeros(len(tokens), np.bool_)
        segments = list(segments_of(data.tokenizer, tokens, counted))
        name = f"sample {sample.number}, record {sample.prompt.number + 1}"
        return [SampleView(tokens, counted.astype(np.float32), bracketed(segments), segments, name)]


def _group(config: RunConfig) -> int:
    return config.section(ReinforcementConfig).num_generations or 1


KIND = PromptFiles()
