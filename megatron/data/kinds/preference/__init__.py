"""Prompts with answers of which some are better than others, in place of .bin/.idx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.config import ConfigError
from megatron.config.kinds.curriculum import CurriculumConfig, sequence_lengths
from megatron.config.kinds.instruction import InstructionConfig
from megatron.config.kinds.preference import PreferenceConfig
from megatron.data.build import SourceReader
from megatron.data.indexed import idx_path
from megatron.data.kinds.instruction.example_encoder import ExampleEncoder
from megatron.data.kinds.preference.examples import PreferenceExamples
from megatron.data.kinds.preference.samples import PreferenceRecipe
from megatron.data.pipeline import DataKind, DataPipeline
from megatron.data.preference_batch import PreferenceCollator
from megatron.data.sources import DataSource

_GPU_MULTIPLE = 8
"""On GPUs lengths are multiples of it: fewer different shapes, with fast kernels."""


class Preferences(DataKind):
    """Files of preferences instead of .bin/.idx."""

    def reader(self, data: DataPipeline) -> SourceReader:
        config = data.config.kind(InstructionConfig)
        loss = data.config.kind(PreferenceConfig).preference
        if loss is None:
            raise ConfigError(
                "data of the type preference need --preference, the loss that they are trained by"
            )
        if sequence_lengths(data.config.kind(CurriculumConfig)) is not None:
            raise ConfigError(
                "a curriculum of sequence lengths cuts samples, and would cut off the answers of "
                "preference data: use one or the other"
            )
        recipe = PreferenceRecipe(
            data.seq_length + 1, data.seed, skip_long=config.on_long_example == "skip"
        )

        def open_examples(path: str, source: DataSource) -> PreferenceExamples:
            if idx_path(path).is_file() and not Path(path).exists():
                raise ConfigError(
                    f"{path} is the prefix of a .bin and an .idx; --preference reads files of "
                    "prompts with better and worse answers (JSON or JSON lines)"
                )
            encoder = ExampleEncoder(config, data.tokenizer, data.config.tokenizer)
            return PreferenceExamples.open(path, encoder, loss == "kto", data.cache(path))

        return SourceReader(open_examples, recipe)

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> PreferenceCollator:
        if data.config.data.mock_data:
            raise ConfigError(
                "--mock-data has no preferences: name files, or leave --preference out"
            )
        parallel = data.config.parallel
        slices = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
        # The micro batches of a pipeline's step have one shape.
        length = data.seq_length if parallel.pipeline_model_parallel_size > 1 else None
        on_gpu = torch.cuda.is_available()
        multiple = int(np.lcm(_GPU_MULTIPLE, slices)) if on_gpu else slices
        return PreferenceCollator(data.scored_batch, length, multiple)


KIND = Preferences()
