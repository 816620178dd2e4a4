"""The data of a GPT: streams of text, instructions and answers, text to be filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config import ConfigError
from megatron.config.curriculum import sequence_lengths
from megatron.data.batch import GPTBatch, GPTCollator
from megatron.data.build import Kind
from megatron.data.fill_in_the_middle import FimRecipe, FimTokens
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.indexed import idx_path
from megatron.data.instruction import ExampleEncoder, InstructionExamples, InstructionRecipe
from megatron.data.mock import MockGPTDataset
from megatron.data.run_data import INSTRUCTION, TEXT, RunData, SampleView
from megatron.data.samples import SampleRecipe
from megatron.data.sources import INDEXED, Source


class GPTData(RunData):
    """The data of a GPT's run."""

    def kinds(self) -> dict[str, Callable[[], Kind]]:
        """See `RunData.kinds`."""
        return {
            INDEXED: lambda: Kind(self.open_indexed, self._stream()),
            TEXT: lambda: Kind(self.open_text, self._stream()),
            INSTRUCTION: lambda: Kind(self.open_instructions, self._examples()),
        }

    def collator(self) -> GPTCollator:
        """See `RunData.collator`."""
        data, fim = self.config.data, self.config.fill_in_the_middle
        return GPTCollator(
            self._eod(),
            data.reset_position_ids,
            data.reset_attention_mask,
            data.eod_mask_loss,
            pad_token=FimTokens.of(fim, self.tokenizer).pad if fim.fim_data else None,
        )

    def mock(self, num_samples: int, part: int) -> MockGPTDataset:
        """See `RunData.mock`."""
        vocab_size = self.tokenizer.vocab_size
        return MockGPTDataset(
            num_samples, self.seq_length, vocab_size, self.seed, part, self._eod()
        )

    def view(self, sample: Any, length: int) -> SampleView:
        """See `RunData.view`; documents that attention keeps apart are on lines of their own."""
        batch: GPTBatch = self.collator()([sample])
        tokens_S = batch.tokens_BS[0, :length].numpy()
        loss_mask_S = batch.loss_mask_BS[0, :length].numpy()
        starts = np.empty(0, np.int64)
        if batch.document_ids_BS is not None:
            starts = np.flatnonzero(np.diff(batch.document_ids_BS[0, :length].numpy())) + 1
        # Position i of the mask is about token i + 1; the first token ends the previous sample.
        predicted_S = np.concatenate((loss_mask_S[:1], loss_mask_S[:-1])) > 0
        text = "\n".join(
            "".join(self._marked(tokens, predicted))
            for tokens, predicted in zip(
                np.split(tokens_S, starts), np.split(predicted_S, starts), strict=True
            )
        )
        return SampleView(tokens_S, loss_mask_S, text)

    def open_instructions(self, path: str, source: Source) -> InstructionExamples:
        """Opens files of instructions and answers; see `Kind.open`."""
        config = self.config
        if idx_path(path).is_file() and not Path(path).exists():
            raise ConfigError(
                f"{path} is the prefix of a .bin and an .idx; --sft, and the type instruction, "
                "read files of instructions and answers (JSON or JSON lines)"
            )
        encoder = ExampleEncoder(config.instruction, self.tokenizer, config.tokenizer)
        return InstructionExamples.open(path, encoder, self.cache(path))

    def _stream(self) -> SampleRecipe[Any]:
        stream, fim = GPTRecipe(self.seq_length, self.seed), self.config.fill_in_the_middle
        if not fim.fim_data:
            return stream
        return FimRecipe.from_config(stream, fim, self.text_encoder, self.seed)

    def _examples(self) -> InstructionRecipe:
        if sequence_lengths(self.config.curriculum) is not None:
            raise ConfigError(
                "a curriculum of sequence lengths cuts samples, and so the answers off instruction "
                "data: give one or the other"
            )
        return InstructionRecipe.from_config(
            self.config.instruction, self.seq_length, self.seed, self.tokenizer
        )

    def _marked(self, tokens: np.ndarray, predicted: np.ndarray) -> Iterator[str]:
        """Stretches of tokens that the loss asks for, or not, as text."""
        changes = np.flatnonzero(np.diff(predicted)) + 1
        for part in np.split(np.arange(len(tokens)), changes):
            text = self.tokenizer.detokenize(tokens[part].tolist())
            yield text if predicted[part[0]] else f"[[{text}]]"

    def _eod(self) -> int | None:
        data = self.config.data
        if not (data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss):
            return None
        fim = self.config.fill_in_the_middle
        return FimTokens.of(fim, self.tokenizer).eod if fim.fim_data else self.tokenizer.eod
