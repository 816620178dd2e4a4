"""Batches of GPT samples: how sequences share samples, and how samples are collated.

Shape suffixes: B micro batch, S sequence, T the S + 1 tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.data.samples import PackedSample
from megatron.data.texts import ScoredText, padded
from megatron.tokenizer import Tokenizer
from megatron.util.digests import hash64


def best_fit(
    lengths: npt.NDArray[np.integer], order: npt.NDArray[np.int64], capacity: int
) -> npt.NDArray[np.int64]:
    """The number of the sample, from 0, of each sequence in `order`: the fullest one with space for
    all of it, else a new one. `lengths` has those of every sequence, none above `capacity` tokens.

    Best fit needs at most 1.7 times the fewest samples possible (Johnson et al. 1974); on lengths
    of instruction data it is within a few percent. In a random order, unlike one by length, samples
    are random mixtures and no epoch repeats those of another.
    """
    open_samples: list[list[int]] = [[] for _ in range(capacity + 1)]  # by their free space
    spaces = 0  # bit s is set where a sample has space for s tokens: shifts find the next in C
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


def padding_token(tokenizer: Tokenizer) -> int:
    """The tokenizer's padding token, or the end of document where it has none."""
    try:
        return tokenizer.pad
    except ValueError:
        return tokenizer.eod


def positions_within(document_ids_BS: Tensor) -> Tensor:
    """int64 [B, S]: positions that restart where the id (int64) changes."""
    last_B1 = document_ids_BS[:, -1:]
    return restarting_positions(document_ids_BS.diff(append=last_B1 + 1) != 0)


def restarting_positions(is_last_BS: Tensor) -> Tensor:
    """int64 [B, S]: positions that restart after each last token of a sequence (bool)."""
    positions_S = torch.arange(is_last_BS.shape[1], device=is_last_BS.device)
    start_BS = torch.zeros_like(is_last_BS, dtype=torch.int64)
    start_BS[:, 1:] = torch.where(is_last_BS[:, :-1], positions_S[1:], 0)
    return positions_S - start_BS.cummax(dim=1).values


def share_within_documents(document_ids_BS: Tensor, length: int) -> Tensor:
    """float32 scalar on the device: of the pairs of tokens in sequences of ``length`` tokens the
    share within documents, the sum of their squared lengths over that of the sequences; in shorter
    sequences relative to as many tokens."""
    pairs = 2 * positions_within(document_ids_BS) + 1  # add up to l^2 over l tokens
    return pairs.sum(dtype=torch.float32) / (document_ids_BS.numel() * length)


class GPTBatch(NamedTuple):
    tokens_BS: Tensor
    """Input, int64."""
    labels_BS: Tensor
    """The token after each input token, int64."""
    loss_mask_BS: Tensor
    """1.0 where the loss counts, else 0.0; float32."""
    position_ids_BS: Tensor | None
    """int64; None if they are 0 to S - 1."""
    document_ids_BS: Tensor | None
    """int64; a token attends to equal ids only. None if it attends across documents."""
    positions_BP: Tensor | None = None
    """Positions where loss_mask_BS is not 0, ascending, then positions where it is; int64. The head
    needs no others. None for all. Those of examples are [1, P], of all rows one after another."""
    choices_BK: Tensor | None = None
    """Labels to score, in place of those of labels_BS, at the last K of positions_BP; int64."""
    weights_2: Tensor | None = None
    """Weights of the batch among those of a step, float64: of its loss, and of its tokens whose
    loss counts. As collated they are sums; once the whole step is known, relative to the mean over
    its micro batches on all ranks."""
    keys_B: Tensor | None = None
    """Digest of each sample, int64, for what is kept of samples; None where nothing is."""

    @classmethod
    def scoring(
        cls, texts: Sequence[ScoredText], length: int, longest: int | None = None
    ) -> GPTBatch:
        """Texts in which the tokens of the continuations are to be scored, padded on the right,
        where no other token sees it. Padding after the ``longest`` positions of a model has the
        last of them."""
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
        """Whole texts, padded on the right, for a head that reads each one's last token: the only
        position that counts."""
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

    def example_lengths(self) -> Tensor:
        """float32 [B, S]: for every token the tokens of its document; where a row is one document
        and padding, those up to the last whose loss counts."""
        if self.document_ids_BS is None:
            counted_BS = self.loss_mask_BS > 0
            numbers_S = torch.arange(1, counted_BS.shape[1] + 1, device=counted_BS.device)
            last_B1 = (counted_BS * numbers_S).amax(1, keepdim=True).clamp(min=1)
            return last_B1.expand(counted_BS.shape).float()
        ids_BS = self.document_ids_BS
        counts_BD = torch.zeros(ids_BS.shape[0], ids_BS.shape[1] + 1, device=ids_BS.device)
        counts_BD.scatter_add_(1, ids_BS, torch.ones_like(ids_BS, dtype=torch.float32))
        return counts_BD.gather(1, ids_BS)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> GPTBatch:
        return GPTBatch._make(
            None if tensor is None else tensor.to(device, non_blocking=non_blocking)
            for tensor in self
        )

    def shortened(self, seq_length: int) -> GPTBatch:
        """The first ``seq_length`` tokens of every sample."""
        assert self.tokens_BS.shape[1] >= seq_length
        assert self.positions_BP is None and self.weights_2 is None
        return GPTBatch._make(
            tensor if tensor is None or tensor.dim() == 1 else tensor[:, :seq_length].contiguous()
            for tensor in self
        )

    def folded(self, seq_length: int, rows: int) -> GPTBatch:
        """The first rows of ``seq_length`` tokens and a label each that the samples are divided
        into, one sample after another, and after them the end of each."""
        assert self.positions_BP is None and self.weights_2 is None and self.keys_B is None
        width, length = seq_length + 1, self.tokens_BS.shape[1] + 1
        whole = length // width * width

        def fold(values_BT: Tensor) -> Tensor:
            parts = values_BT[:, :whole].reshape(-1, width), values_BT[:, -width:]
            return torch.cat(parts)[:rows]

        def of_inputs(values_BS: Tensor | None) -> Tensor | None:
            return (
                None if values_BS is None else fold(F.pad(values_BS, (0, 1)))[:, :-1].contiguous()
            )

        text_RT = fold(torch.cat((self.tokens_BS, self.labels_BS[:, -1:]), dim=1))
        positions_RS = of_inputs(self.position_ids_BS)
        if positions_RS is not None:
            # They restart at the beginning of a row, too.
            numbers_S = torch.arange(seq_length, device=positions_RS.device)
            starts_RS = torch.where(positions_RS == 0, numbers_S, 0).cummax(dim=1).values
            positions_RS = numbers_S - starts_RS
        mask_RS = of_inputs(self.loss_mask_BS)
        assert mask_RS is not None
        return GPTBatch(
            text_RT[:, :-1].contiguous(),
            text_RT[:, 1:].contiguous(),
            mask_RS,
            positions_RS,
            of_inputs(self.document_ids_BS),
        )

    def lengthened(self, seq_length: int) -> GPTBatch:
        """With padding after every sample, up to ``seq_length`` tokens: the last token again,
        without a loss, in no document of the sample's."""
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
            # From 0 as after every document, so that none is above those that the model has.
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
class Padding:
    """Fills up samples of different lengths with a token, to the longest of a batch."""

    token: int
    multiple: int = 1
    """The number of inputs of every sample is rounded up to a multiple of this."""

    def filled(
        self, samples: Sequence[np.ndarray | PackedSample]
    ) -> tuple[list[np.ndarray | PackedSample], bool]:
        """The samples, all of one length; and whether one of them has several documents that
        attention must keep apart."""
        inputs = max(len(s.loss_mask_S) if isinstance(s, PackedSample) else len(s) - 1
                     for s in samples)  # fmt: skip
        inputs = -(-inputs // self.multiple) * self.multiple
        filled: list[np.ndarray | PackedSample] = []
        separate = False
        for sample in samples:
            if not isinstance(sample, PackedSample):
                assert len(sample) == inputs + 1, (len(sample), inputs)
                filled.append(sample)
                separate = True
                continue
            missing = inputs - len(sample.loss_mask_S)
            last = sample.document_ids_S[-1]
            separate |= bool((sample.document_ids_S[sample.loss_mask_S > 0] != 0).any())
            filled.append(
                PackedSample(
                    np.pad(sample.tokens_T, (0, missing), constant_values=self.token),
                    np.pad(sample.loss_mask_S, (0, missing)),
                    np.pad(sample.document_ids_S, (0, missing), constant_values=last + 1),
                )
            )
        return filled, separate


@dataclass(frozen=True)
class GPTCollator:
    """Stacks samples into a GPTBatch: int64[S + 1], whose positions, attention and loss follow from
    its end-of-document tokens and the flags, or PackedSamples, which contain them. ValueError if a
    flag needs the end-of-document token and the tokenizer has none."""

    eod_token: int | None = None
    reset_position_ids: bool = False
    """Positions restart after each end-of-document token."""
    reset_attention_mask: bool = False
    """Attention stays within a document, including its end-of-document token."""
    eod_mask_loss: bool = False
    """No loss where the input is the end-of-document token."""
    pad_token: int | None = None
    """No loss where the label is this token; None for samples without padding."""
    padding: Padding | None = None
    """Filling of PackedSamples that are shorter than others; None where none is."""
    weigh_by: str | None = None
    """Unit that counts equally in the loss of a step: ``micro-batches``, ``tokens`` or
    ``examples``; None leaves the weights out."""

    identifies: bool = False
    """True if batches have ``keys_B``."""
    head_multiple: int | None = None
    """Batches have ``positions_BP`` where that spares the head work, as many as a multiple of this;
    None for all."""

    def __post_init__(self) -> None:
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) and self.eod_token is None:
                raise ValueError(
                    f"--{name.replace('_', '-')} needs an end-of-document token, and the tokenizer "
                    "has none"
                )

    def __call__(self, samples: Sequence[np.ndarray | PackedSample]) -> GPTBatch:
        keys_B = torch.tensor([_key(sample) for sample in samples]) if self.identifies else None
        separate = self.padding is None
        if self.padding is not None:
            samples, separate = self.padding.filled(samples)
        packed = {row: s for row, s in enumerate(samples) if isinstance(s, PackedSample)}
        batch = self._by_flags(
            np.stack([s.tokens_T if isinstance(s, PackedSample) else s for s in samples])
        )
        if packed:
            batch = _with_packed(batch, packed)
        if self.weigh_by is not None:
            batch = _weighed(batch, self.weigh_by)
        batch = batch._replace(keys_B=keys_B)
        if self.head_multiple is not None:
            batch = batch._replace(
                positions_BP=_counted_positions(batch.loss_mask_BS, self.head_multiple)
            )
        # Of a row that is one example and padding, causal attention keeps the two apart.
        return batch if separate else batch._replace(position_ids_BS=None, document_ids_BS=None)

    def _by_flags(self, samples_BT: np.ndarray) -> GPTBatch:
        tokens_BT = torch.from_numpy(samples_BT)
        tokens_BS, labels_BS = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
        loss_mask_BS = torch.ones(tokens_BS.shape, dtype=torch.float32)
        if self.pad_token is not None:
            loss_mask_BS[labels_BS == self.pad_token] = 0.0
        if self.eod_token is None:
            return GPTBatch(tokens_BS, labels_BS, loss_mask_BS, None, None)
        is_eod_BS = tokens_BS == self.eod_token
        if self.eod_mask_loss:
            loss_mask_BS[is_eod_BS] = 0.0
        return GPTBatch(
            tokens_BS,
            labels_BS,
            loss_mask_BS,
            restarting_positions(is_eod_BS) if self.reset_position_ids else None,
            _document_ids(is_eod_BS) if self.reset_attention_mask else None,
        )


def _key(sample: np.ndarray | PackedSample) -> int:
    """Return the key of a sample: 63 bits of the digest of what a model reads of it."""
    parts = [sample]
    if isinstance(sample, PackedSample):
        parts = [sample.tokens_T, sample.document_ids_S]
    return hash64(b"".join(np.asarray(part, np.int64).tobytes() for part in parts)) >> 1


def _with_packed(batch: GPTBatch, packed: Mapping[int, PackedSample]) -> GPTBatch:
    shape = batch.tokens_BS.shape
    positions_BS, document_ids_BS = batch.position_ids_BS, batch.document_ids_BS
    if positions_BS is None:
        positions_BS = torch.arange(shape[1]).repeat(shape[0], 1)
    if document_ids_BS is None:
        document_ids_BS = torch.zeros(shape, dtype=torch.int64)
    for row, sample in packed.items():
        batch.loss_mask_BS[row] = torch.from_numpy(sample.loss_mask_S)
        document_ids_BS[row] = torch.from_numpy(sample.document_ids_S)
        positions_BS[row] = positions_within(document_ids_BS[row : row + 1])[0]
    return batch._replace(position_ids_BS=positions_BS, document_ids_BS=document_ids_BS)


def _weighed(batch: GPTBatch, by: str) -> GPTBatch:
    """With weights; by ``examples`` every document has as much of the loss mask, whose sum is the
    number of tokens that count in all cases."""
    mask_BS, documents_BS = batch.loss_mask_BS, batch.document_ids_BS
    counted = mask_BS.sum().double()
    weight = {"micro-batches": torch.ones_like(counted), "tokens": counted}.get(by)
    if weight is None:
        numbers_BS = torch.arange(len(mask_BS))[:, None].expand_as(mask_BS)
        if documents_BS is not None:
            numbers_BS = numbers_BS * (int(documents_BS.max()) + 1) + documents_BS
        counts_E = torch.bincount(numbers_BS.flatten(), mask_BS.flatten().double())
        weight = (counts_E > 0).sum().double()
        share = counted / weight.clamp(min=1)
        mask_BS = (mask_BS * share / counts_E[numbers_BS].clamp(min=1)).float()
    return batch._replace(loss_mask_BS=mask_BS, weights_2=torch.stack((weight, counted)))


def _counted_positions(loss_mask_BS: Tensor, multiple: int) -> Tensor | None:
    """``GPTBatch.positions_BP`` of all rows together, [1, P], as many as a multiple; None if that
    is all."""
    mask_T = loss_mask_BS.flatten()
    count = max(1, int((mask_T > 0).sum()))
    count = -(-count // multiple) * multiple
    if count >= len(mask_T):
        return None
    # Each once, so that no gradient is a sum in an order that may change.
    return (mask_T == 0).to(torch.uint8).argsort(stable=True)[None, :count].contiguous()


def _document_ids(is_eod_BS: Tensor) -> Tensor:
    """Number of end-of-document tokens strictly before each position."""
    return is_eod_BS.cumsum(dim=1) - is_eod_BS.long()
