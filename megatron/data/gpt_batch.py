"""GPT batches: packing of sequences into samples, and collation of samples.

Shape suffixes: B micro batch, S sequence, T = S + 1 tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.texts import ScoredText, padded
from megatron.util.digests import hash64


def best_fit(
    lengths: npt.NDArray[np.integer], order: npt.NDArray[np.int64], capacity: int
) -> npt.NDArray[np.int64]:
    """Pack sequences by best fit: put each one into the fullest sample with enough free space, else
    into a new one. Return the sample index of each sequence in `order`. `lengths` covers all
    sequences, none longer than `capacity` tokens.

    Best fit needs at most 1.7 times the minimum number of samples (Johnson et al. 1974), and on
    instruction data only a few percent more than it. In a random order, unlike sorted by length,
    samples are random mixtures, and no epoch repeats the samples of another.
    """
    open_samples: list[list[int]] = [[] for _ in range(capacity + 1)]  # indexed by free space
    spaces = 0  # bit s is set if a sample has s free tokens; shifts make the search fast
    sample_of = np.empty(len(order), np.int64)
    samples = 0
    for place, length in enumerate(lengths[order].tolist()):
        assert length <= capacity
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            sample = open_samples[space].pop()
            if not open_samples[space]:
                spaces ^= 1 << space
        else:
            space, sample = capacity, samples
            samples += 1
        sample_of[place] = sample
        space -= length
        if space:
            open_samples[space].append(sample)
            spaces |= 1 << space
    return sample_of


def positions_within(document_ids_BS: Tensor) -> Tensor:
    """Return position ids, int64 [B, S], that restart where the document id changes."""
    last_B1 = document_ids_BS[:, -1:]
    return restarting_positions(document_ids_BS.diff(append=last_B1 + 1) != 0)


def restarting_positions(is_last_BS: Tensor) -> Tensor:
    """Return position ids, int64 [B, S], that restart after each True in ``is_last_BS``."""
    positions_S = torch.arange(is_last_BS.shape[1], device=is_last_BS.device)
    start_BS = torch.zeros_like(is_last_BS, dtype=torch.int64)
    start_BS[:, 1:] = torch.where(is_last_BS[:, :-1], positions_S[1:], 0)
    return positions_S - start_BS.cummax(dim=1).values


def share_within_documents(document_ids_BS: Tensor, length: int) -> Tensor:
    """Return the fraction of token pairs that are within one document, a float32 scalar on the
    device: the sum of the documents' squared lengths, divided by the same sum if the tokens formed
    sequences of ``length`` tokens without document boundaries."""
    pairs = 2 * positions_within(document_ids_BS) + 1  # sums to l^2 over l tokens
    return pairs.sum(dtype=torch.float32) / (document_ids_BS.numel() * length)


class GPTBatch(NamedTuple):
    tokens_BS: Tensor
    """Input tokens, int64."""
    labels_BS: Tensor
    """Token after each input token, int64."""
    loss_mask_BS: Tensor
    """1.0 where the loss counts, else 0.0; float32."""
    position_ids_BS: Tensor | None
    """Position ids, int64; None for 0 to S - 1."""
    document_ids_BS: Tensor | None
    """Document ids, int64: tokens attend to equal ids only. None for attention across documents."""
    positions_BP: Tensor | None = None
    """Positions for which the head computes logits, int64: those where loss_mask_BS is not 0 first,
    ascending. None for all. With instructions, [1, P] indices into the flattened B * S tokens."""
    choices_BK: Tensor | None = None
    """Labels to score instead of labels_BS at the last K of positions_BP, int64."""
    weights_2: Tensor | None = None
    """Weights within a step, float64: of the batch's loss, and of its number of tokens in the loss.
    Collation stores sums. Once the whole step is known, they are divided by their mean over the
    step's micro batches on all ranks."""
    keys_B: Tensor | None = None
    """Digest of each sample, int64: the key for storing its results. None if nothing is stored."""

    @classmethod
    def scoring(
        cls, texts: Sequence[ScoredText], length: int, longest: int | None = None
    ) -> GPTBatch:
        """Return a batch of texts whose continuations are scored. Rows are padded on the right,
        where no token sees the padding. Position ids beyond a model's ``longest`` positions, which
        only padding has, are clamped to the last one."""
        rows = [np.concatenate((text.context, text.continuation)) for text in texts]
        tokens_BS = padded([row[:-1] for row in rows], length)
        labels_BS = padded([row[1:] for row in rows], length)
        loss_mask_BS = np.zeros((len(rows), length), np.float32)
        choices_BK = np.stack([text.choices for text in texts])
        chosen = choices_BK.shape[1]
        for mask_S, row, text in zip(loss_mask_BS, rows, texts, strict=True):
            mask_S[len(text.context) - 1 : len(row) - 1 - (chosen > 0)] = 1.0
        most = int(loss_mask_BS.sum(1).max())
        positions_BP = np.argsort(loss_mask_BS == 0, axis=1, kind="stable")[:, :most]
        if chosen:
            last_B1 = np.array([[len(row) - 2] for row in rows])
            positions_BP = np.concatenate((positions_BP, last_B1.repeat(chosen, axis=1)), axis=1)
        tokens, labels, loss_mask, positions, choices = map(
            torch.from_numpy,
            (tokens_BS, labels_BS, loss_mask_BS, positions_BP.copy(), choices_BK),
        )
        position_ids_BS = None
        if longest is not None and longest < length:
            position_ids_BS = torch.arange(length).clamp(max=longest - 1).repeat(len(rows), 1)
        return cls(
            tokens,
            labels,
            loss_mask,
            position_ids_BS,
            document_ids_BS=None,
            positions_BP=None if most == length and not chosen else positions,
            choices_BK=choices if chosen else None,
        )

    @classmethod
    def ended(cls, rows: Sequence[np.ndarray], length: int) -> GPTBatch:
        """Return a batch of whole texts, padded on the right, for a head that reads each text's
        last token. Only this position counts in the loss mask, and labels are all 0."""
        last_B1 = np.array([[len(row) - 1] for row in rows])
        loss_mask_BS = np.zeros((len(rows), length), np.float32)
        np.put_along_axis(loss_mask_BS, last_B1, 1.0, axis=1)
        tokens_BS = torch.from_numpy(padded(rows, length))
        return cls(
            tokens_BS,
            torch.zeros_like(tokens_BS),
            torch.from_numpy(loss_mask_BS),
            position_ids_BS=None,
            document_ids_BS=None,
            positions_BP=torch.from_numpy(last_B1),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GPTBatch:
        return GPTBatch._make(
            None if tensor is None else tensor.to(device, non_blocking=non_blocking)
            for tensor in self
        )

    def shortened(self, seq_length: int) -> GPTBatch:
        """Return the batch with every sample cut to its first ``seq_length`` tokens."""
        assert self.tokens_BS.shape[1] >= seq_length
        assert self.positions_BP is None and self.weights_2 is None
        return GPTBatch._make(
            tensor if tensor is None or tensor.dim() == 1 else tensor[:, :seq_length].contiguous()
            for tensor in self
        )

    def lengthened(self, seq_length: int) -> GPTBatch:
        """Return the batch with every sample padded to ``seq_length`` tokens. Padding repeats the
        last token, does not count in the loss, and forms a document of its own."""
        missing = seq_length - self.tokens_BS.shape[1]
        if not missing:
            return self
        assert missing > 0
        documents_BS = self.document_ids_BS
        if documents_BS is not None:
            last_B1 = documents_BS[:, -1:] + 1
            documents_BS = torch.cat((documents_BS, last_B1.expand(-1, missing)), dim=1)
        positions_BS = self.position_ids_BS
        if positions_BS is not None:
            # From 0, as in any new document, so that no position exceeds the model's maximum.
            new_S = torch.arange(missing, device=positions_BS.device)
            positions_BS = torch.cat((positions_BS, new_S.expand(len(positions_BS), -1)), dim=1)
        tokens_BS, labels_BS = (
            torch.cat((each, each[:, -1:].expand(-1, missing)), dim=1)
            for each in (self.tokens_BS, self.labels_BS)
        )
        positions_BP = self.positions_BP
        if positions_BP is not None:
            length = self.tokens_BS.shape[1]
            positions_BP = positions_BP // length * seq_length + positions_BP % length
        return self._replace(
            positions_BP=positions_BP,
            tokens_BS=tokens_BS,
            labels_BS=labels_BS,
            loss_mask_BS=F.pad(self.loss_mask_BS, (0, missing)),
            position_ids_BS=positions_BS,
            document_ids_BS=documents_BS,
        )


@dataclass(frozen=True)
class GPTCollator:
    """Collator of samples, int64[S + 1], into a GPTBatch. The flags determine how end-of-document
    tokens affect positions, attention and loss. Raises ValueError if a flag needs the
    end-of-document token and the tokenizer does not have one."""

    eod_token: int | None = None
    reset_position_ids: bool = False
    """Restart positions after each end-of-document token."""
    reset_attention_mask: bool = False
    """Limit attention to a document, including its end-of-document token."""
    eod_mask_loss: bool = False
    """Compute no loss where the input is the end-of-document token."""
    pad_token: int | None = None
    """Token whose prediction does not count in the loss; None for samples without padding."""
    identifies: bool = False
    """True if batches must have ``keys_B``."""

    def __post_init__(self) -> None:
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and self.eod_token is None:
                raise ValueError(
                    f"--{name.replace('_', '-')} needs an end-of-document token, and the tokenizer "
                    "has none"
                )

    def __call__(self, samples: Sequence[np.ndarray]) -> GPTBatch:
        tokens_BT = torch.from_numpy(np.stack(samples))
        tokens_BS, labels_BS = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
        loss_mask_BS = torch.ones(tokens_BS.shape, dtype=torch.float32)
        keys_B = torch.tensor([*map(key_of, samples)]) if self.identifies else None
        if self.pad_token is not None:
            loss_mask_BS[labels_BS == self.pad_token] = 0.0
        if self.eod_token is None:
            return GPTBatch(tokens_BS, labels_BS, loss_mask_BS, None, None, keys_B=keys_B)
        is_eod_BS = tokens_BS == self.eod_token
        if self.eod_mask_loss:
            loss_mask_BS[is_eod_BS] = 0.0
        return GPTBatch(
            tokens_BS,
            labels_BS,
            loss_mask_BS,
            restarting_positions(is_eod_BS) if self.reset_position_ids else None,
            _document_ids(is_eod_BS) if self.reset_attention_mask else None,
            keys_B=keys_B,
        )


def key_of(*parts: np.ndarray) -> int:
    """Return a sample's key: 63 bits of the digest of the arrays that a model reads."""
    return hash64(b"".join(np.asarray(part, np.int64).tobytes() for part in parts)) >> 1


def _document_ids(is_eod_BS: Tensor) -> Tensor:
    """Return the number of end-of-document tokens strictly before each position."""
    return is_eod_BS.cumsum(dim=1) - is_eod_BS.long()
