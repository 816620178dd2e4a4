"""The data of a GPT: streams of text, instructions and answers, text to be filled in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from typing import Any

import numpy as np

from megatron.data.batch import GPTBatch, GPTCollator
from megatron.data.build import Kind
from megatron.data.gpt_dataset import GPTRecipe
from megatron.data.mock import MockGPTDataset
from megatron.data.run_data import INSTRUCTION, TEXT, RunData, SampleView
from megatron.data.samples import SampleRecipe
from megatron.data.sources import INDEXED

FILL_IN_THE_MIDDLE = "megatron.data.fill_in_the_middle"
"""Imported with --fim-data only."""


class GPTData(RunData):
    """The data of a GPT's run."""

    def kinds(self) -> dict[str, Callable[[], Kind]]:
        """See `RunData.kinds`."""
        return {
            INDEXED: lambda: Kind(self.open_indexed, self._stream()),
            TEXT: lambda: self.kind(TEXT, self._stream()),
            INSTRUCTION: lambda: self.kind(INSTRUCTION),
        }

    def collator(self) -> GPTCollator:
        """See `RunData.collator`."""
        data, fim = self.config.data, self._fim_tokens
        return GPTCollator(
            self._eod(),
            data.reset_position_ids,
            data.reset_attention_mask,
            data.eod_mask_loss,
            pad_token=None if fim is None else fim.pad,
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

    def _stream(self) -> SampleRecipe[Any]:
        stream, fim = GPTRecipe(self.seq_length, self.seed), self.config.fill_in_the_middle
        if not fim.fim_data:
            return stream
        recipe = resolve_name(f"{FILL_IN_THE_MIDDLE}:FimRecipe")
        return recipe.from_config(stream, fim, self.text_encoder, self.seed)

    @property
    def _fim_tokens(self) -> Any:
        """Those that fill-in-the-middle puts in; None without it."""
        fim = self.config.fill_in_the_middle
        if not fim.fim_data:
            return None
        return resolve_name(f"{FILL_IN_THE_MIDDLE}:FimTokens").of(fim, self.tokenizer)

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
        fim = self._fim_tokens
        return self.tokenizer.eod if fim is None else fim.eod
