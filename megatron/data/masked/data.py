"""The data of BERT and of T5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from megatron.data.build import Kind
from megatron.data.masked.batch import BertBatch, T5Batch, collate_bert, collate_t5
from megatron.data.masked.bert import BertRecipe, BertSample
from megatron.data.masked.t5 import T5Recipe, T5Sample
from megatron.data.masked.tfrecord_bert import TFRecordRecipe
from megatron.data.run_data import TEXT, TFRECORD, RunData, SampleView
from megatron.data.sources import INDEXED


class BertData(RunData):
    """The data of a BERT's run: sentences, or TFRecords that are masked already."""

    unit, is_masked = "sentence", True

    def kinds(self) -> dict[str, Callable[[], Kind]]:
        """See `RunData.kinds`."""
        return {
            INDEXED: lambda: Kind(self.open_indexed, self._pairs()),
            TEXT: lambda: self.kind(TEXT, self._pairs()),
            TFRECORD: lambda: self.kind(TFRECORD, self._records()),
        }

    def collator(self) -> Callable[[Sequence[BertSample]], BertBatch]:
        """See `RunData.collator`."""
        return collate_bert

    def view(self, sample: BertSample, length: int) -> SampleView:
        """See `RunData.view`; what the model gets stands before the token that it is to predict."""
        batch = self.collator()([sample])
        tokens_S, labels_S, loss_mask_S, padding_mask_S = (
            values[0, :length].numpy()
            for values in (
                batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS, batch.padding_mask_BS
            )
        )  # fmt: skip
        words = []
        for predicted, group in groupby(
            range(int(padding_mask_S.sum())), key=lambda place: bool(loss_mask_S[place])
        ):
            places = list(group)
            text = self.tokenizer.detokenize(tokens_S[places].tolist())
            label = self.tokenizer.detokenize(labels_S[places].tolist()) if predicted else ""
            words.append(f"{text} -> {label}" if predicted else f"[[{text}]]")
        kind = "random" if int(batch.is_random_B[0]) else "in order"
        return SampleView(tokens_S, loss_mask_S, f"({kind}) " + " ".join(words))

    def _pairs(self) -> BertRecipe:
        return BertRecipe.from_config(
            self.config.masked_data, self.tokenizer, self.seq_length, self.seed
        )

    def _records(self) -> TFRecordRecipe:
        return TFRecordRecipe.from_config(self.tokenizer, self.seq_length, self.seed)


class T5Data(RunData):
    """The data of a T5's run."""

    unit, is_masked = "sentence", True

    def kinds(self) -> dict[str, Callable[[], Kind]]:
        """See `RunData.kinds`."""
        return {
            INDEXED: lambda: Kind(self.open_indexed, self._spans()),
            TEXT: lambda: self.kind(TEXT, self._spans()),
        }

    def collator(self) -> Callable[[Sequence[T5Sample]], T5Batch]:
        """See `RunData.collator`."""
        return collate_t5

    def view(self, sample: T5Sample, length: int) -> SampleView:
        """See `RunData.view`; the encoder's input, which has no loss, and what is to be predicted.

        Tokens and loss mask are those of the decoder.
        """
        batch = self.collator()([sample])

        def text(tokens: Any, mask: Any) -> str:
            return self.tokenizer.detokenize(tokens[0][mask[0] > 0].tolist())

        encoder = text(batch.encoder_tokens_BE, batch.encoder_padding_mask_BE)
        labels = text(batch.labels_BD, batch.decoder_padding_mask_BD)
        return SampleView(
            batch.decoder_tokens_BD[0].numpy(),
            batch.loss_mask_BD[0].numpy(),
            f"[[{encoder}]]\n{labels}",
        )

    def _spans(self) -> T5Recipe:
        return T5Recipe.from_config(
            self.config.masked_data, self.tokenizer, self.seq_length, self.seed
        )
