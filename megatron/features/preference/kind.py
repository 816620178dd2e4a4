"""Data kind of preferences: prompts with better and worse answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from megatron.config import ConfigError, RunConfig
from megatron.data.build import SourceReader
from megatron.data.pipeline import DataPipeline
from megatron.data.samples import SampleView, bracketed, segments_of
from megatron.data.texts import ScoredText
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import Example
from megatron.features.instruction.examples import RecordFiles
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import example_files
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.records import PreferenceExamples, read_preferences
from megatron.features.preference.samples import PreferenceCollator, PreferenceRecipe, WholeRows


class Preferences(RecordFiles):
    """Data kind of preferences, read from record files instead of .bin/.idx."""

    flag, contents = "--preference", "prompts with better and worse answers"

    def weighs(self, config: RunConfig) -> bool:
        return True

    def reader(self, data: DataPipeline) -> SourceReader:
        config = data.config.section(InstructionConfig)
        loss = data.config.section(PreferenceConfig).preference
        if loss is None:
            raise ConfigError(
                "data of the type preference need --preference, the loss that they are trained by"
            )
        # The last token is also read, for the reward. As in trl, such rows are never cut.
        whole = loss == "reward"
        recipe = PreferenceRecipe(
            data.seq_length + (not whole),
            data.seed,
            config.split_by == "prompt",
            config.on_long_example == "skip" or whole,
        )

        return self.records(data, recipe, partial(PreferenceExamples.open, judged=loss == "kto"))

    def conversation(self, config: RunConfig, path: str) -> Example | None:
        columns = RecordColumns.of(config.section(InstructionConfig))
        for _, record in islice(read_preferences(example_files(path)[0].path, columns), 1):
            return Example((*record.prompt, *record.answers[0]), record.is_text, record.variables)
        return None

    def collator(
        self, data: DataPipeline, collate: Callable[[Sequence[Any]], Any]
    ) -> PreferenceCollator:
        if data.config.data.mock_data:
            raise ConfigError(
                "--mock-data has no preferences: name files, or leave --preference out"
            )
        if data.config.section(PreferenceConfig).preference == "reward":
            batch_of = WholeRows(data.ending())
            return PreferenceCollator(batch_of, data.length_multiple, data.seq_length, whole=True)
        return PreferenceCollator(data.answering(), data.length_multiple, data.seq_length)

    def views(self, data: DataPipeline, sample: Any) -> list[SampleView] | None:
        """Return a view of each row, including its end token."""
        names = ("better", "worse")
        if sample.desirable is not None:
            names = ("good" if sample.desirable else "bad", "another prompt's, to compare with")
        return [self._view(data, row, name) for row, name in zip(sample.rows, names, strict=True)]

    def _view(self, data: DataPipeline, row: ScoredText, name: str) -> SampleView:
        tokens = np.concatenate((row.context, row.continuation))
        counted = np.arange(len(tokens)) >= len(row.context)
        segments = list(segments_of(data.tokenizer, tokens, counted))
        text = bracketed(segments)
        loss_mask_S = counted[1:].astype(np.float32)
        return SampleView(tokens[:-1], loss_mask_S, text, segments, name)


KIND = Preferences()
