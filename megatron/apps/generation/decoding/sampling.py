"""Sample the next token from logits.

Sampling runs on the CPU, in numpy and one row at a time, so that a row's result does not depend on
other rows or on the number of threads. Shapes: V vocabulary, N tokens kept by the filters.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from megatron.apps.generation.decoding.text_stream import bytes_of_token
from megatron.apps.generation.request import Sampling, TokenScore
from megatron.parallel.random import derive_seed
from megatron.tokenizer import Tokenizer

Row = npt.NDArray[np.float32]  # logits, or unnormalized probabilities
Mask = npt.NDArray[np.bool_]  # bool [V], true for the tokens that may come next
Ids = npt.NDArray[np.int64]

_BLOCK, _SMALL_BLOCK = 256, 32
_BIN_BITS = 11
_AT_ONCE = 2**19  # number of logits processed at a time
_FEW = 4096  # maximum size of a set that is sorted directly; larger sets are reduced first


class TokenSampler:
    """Sampler of the tokens of one sequence, in order. Each draw depends only on the seed, the
    position of the token and its logits, not on other sequences."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], tokenizer: Tokenizer | None = None
    ) -> None:
        """``tokenizer`` is only used for ``prevent_newline_after_colon``, to find newline tokens
        and the text of the last token. Raises ValueError if that option is set without a
        tokenizer."""
        self.sampling = sampling
        self._seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        self._position = len(prompt)
        self._top_p = sampling.top_p
        self._seen = set(prompt) if sampling.repetition_penalty != 1.0 else set()
        self._counts: Counter[int] = Counter()
        self._last = prompt[-1] if prompt else None
        self._tokenizer = tokenizer if sampling.prevent_newline_after_colon else None
        if sampling.prevent_newline_after_colon and tokenizer is None:
            raise ValueError("prevent_newline_after_colon needs a tokenizer")

    def choose(self, logits_V: Tensor, allowed: Mask | None = None) -> int:
        """Return the next token, chosen from raw float32 logits on the CPU, and append it to the
        sequence. Raises ValueError if every token is excluded, or if a logit is NaN or infinite."""
        logits = self._penalized(logits_V.numpy())
        if allowed is not None:
            logits = np.where(allowed, logits, np.float32(-np.inf))
        if self._tokenizer is not None:
            logits = self._without_newline(logits, self._tokenizer)
        _check_largest(logits.max())
        token = int(logits.argmax()) if self.sampling.greedy else self._draw(logits)
        self._add(token)
        return token

    def kept(self, logits_V: Tensor) -> tuple[Ids, Row]:
        """Return the tokens that the filters keep, in ascending order, and the probability of each.
        Both have shape [N]."""
        ids, weights = self._candidates(self._penalized(logits_V.numpy()))
        if ids is None:
            ids = np.arange(len(weights))
        return ids, weights / weights.sum()

    def _add(self, token: int) -> None:
        self._position += 1
        self._last = token
        self._counts[token] += 1
        if self.sampling.repetition_penalty != 1.0:
            self._seen.add(token)
        if self.sampling.top_p_decay > 0:
            self._top_p = max(self._top_p * self.sampling.top_p_decay, self.sampling.top_p_bound)

    def _penalized(self, logits: Row) -> Row:
        """Return the logits after penalties and bias, as defined by transformers and vLLM. The
        argument is not modified."""
        sampling, counts = self.sampling, self._counts
        additive = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        if not (self._seen or (additive and counts) or sampling.bias):
            return logits
        logits = logits.copy()
        if self._seen:
            seen = np.fromiter(self._seen, np.int64, len(self._seen))
            seen = seen[seen < len(logits)]
            factor = np.float32(sampling.repetition_penalty)
            at = logits[seen]
            logits[seen] = np.where(at < 0, at * factor, at / factor)
        if additive and counts:
            tokens = np.fromiter(counts, np.int64, len(counts))
            times = np.fromiter(counts.values(), np.float32, len(counts))
            logits[tokens] -= np.float32(sampling.frequency_penalty) * times
            logits[tokens] -= np.float32(sampling.presence_penalty)
        if bias := sampling.bias:
            tokens = np.fromiter(bias, np.int64, len(bias))
            logits[tokens] += np.fromiter(bias.values(), np.float32, len(bias))
        return logits

    def _without_newline(self, logits: Row, tokenizer: Tokenizer) -> Row:
        if self._last is None or not bytes_of_token(tokenizer, self._last).endswith(b":"):
            return logits
        logits = logits.copy()
        logits[tokenizer.newline_tokens] = -np.inf
        return logits

    def _candidates(self, logits: Row) -> tuple[Ids | None, Row]:
        """Return the ids and unnormalized probabilities of the tokens that the filters keep. The
        ids are None if no filter is active. The filters are applied in the same order as in
        transformers."""
        sampling, ids = self.sampling, None
        logits = logits / np.float32(sampling.temperature)
        if 0 < sampling.top_k < len(logits):
            ids = at_least_kth(logits, sampling.top_k)
            logits = logits[ids]
        weights = np.exp(logits - logits.max())
        if self._top_p < 1:
            ids, weights = _chosen(ids, weights, nucleus(weights, self._top_p))
        if sampling.min_p > 0:
            ids, weights = _chosen(ids, weights, np.flatnonzero(weights >= sampling.min_p))
        return ids, weights

    def _draw(self, logits: Row) -> int:
        ids, weights = self._candidates(logits)
        place = self._place(weights)
        return place if ids is None else int(ids[place])

    def _place(self, weights: Row) -> int:
        uniform = (derive_seed(self._seed, "token", self._position) >> 10) / 2**53
        return place_of(weights, uniform)

    @property
    def unfiltered(self) -> bool:
        """True if tokens are sampled from the plain softmax of logits / temperature, without
        filters, penalties or bias."""
        sampling = self.sampling
        penalized = self._seen or sampling.presence_penalty or sampling.frequency_penalty
        filtered = sampling.top_k > 0 or self._top_p < 1 or sampling.min_p > 0
        other = sampling.bias or self._tokenizer is not None
        return not (sampling.greedy or penalized or filtered or other)

    def choose_softened(self, soft: SoftRow) -> int:
        """Sample the next token of an :attr:`unfiltered` sampler. The result is the same as that of
        :meth:`choose`."""
        _check_largest(soft.largest)
        token = self._place(soft.weights_V)
        self._add(token)
        return token


def _check_largest(largest: np.float32) -> None:
    if not np.isfinite(largest):
        raise ValueError(
            "the model's logits contain NaN or infinity"
            if largest != -np.inf
            else "no token may come next: every one is excluded"
        )


class SoftRow(NamedTuple):
    """Row of a tempered softmax: raw logits divided by a temperature (float32 [V]), the largest of
    them, the weights exp(logit - largest), and the logarithm of the sum of the weights."""

    logits_V: Row
    largest: np.float32
    weights_V: Row
    log_sum: float

    def log_prob(self, token: int) -> float:
        """Return the log-probability of a token."""
        return float(self.logits_V[token]) - float(self.largest) - self.log_sum


def softened(logits_RV: Row, temperature: float) -> Iterator[SoftRow]:
    """Yield a :class:`SoftRow` for each row of raw logits. Each row's result is bitwise independent
    of the other rows."""
    size = max(1, _AT_ONCE // logits_RV.shape[1])
    for first in range(0, len(logits_RV), size):
        rows = logits_RV[first : first + size]
        logits: Row = np.divide(rows, np.float32(temperature), dtype=np.float32)
        largest_R = logits.max(axis=1)
        weights = np.exp(logits - largest_R[:, None])
        # The weights are at most 1, and log_prob subtracts in float64, so no result is rounded to
        # the float32 spacing around the logits.
        log_sums_R = np.log(weights.astype(np.float64).sum(axis=1))
        yield from map(SoftRow, logits, largest_R, weights, log_sums_R.tolist())


def token_score(logits_V: Tensor, token: int, top: int = 0, temperature: float = 1.0) -> TokenScore:
    """Return the log-probability of a token under raw logits divided by a temperature, and the
    ``top`` most probable tokens with their log-probabilities. Ties go to the lower id."""
    (soft,) = softened(logits_V.numpy()[None], temperature)
    ids = most_probable(soft.logits_V, top) if top else []
    return TokenScore(token, soft.log_prob(token), tuple((i, soft.log_prob(i)) for i in ids))


def most_probable(logits: Row, count: int) -> list[int]:
    """Return the ids of the ``count`` largest logits, largest first. Ties go to the lower id."""
    ids = at_least_kth(logits, count) if count < len(logits) else np.arange(len(logits))
    order = np.argsort(-logits[ids], kind="stable")
    return ids[order[:count]].tolist()


def at_least_kth(values: Row, k: int) -> Ids:
    """Return the indices of values that are at least the ``k``-th largest, in ascending order."""
    blocks = len(values) // _SMALL_BLOCK
    if 4 * k > blocks:
        return np.flatnonzero(values >= np.partition(values, len(values) - k)[len(values) - k])
    # At least k blocks have a maximum that reaches the k-th largest block maximum. So the k-th
    # largest value is at least this bound, and only values that reach it need to be searched.
    maxima = values[: blocks * _SMALL_BLOCK].reshape(blocks, _SMALL_BLOCK).max(axis=1)
    some = np.flatnonzero(values >= np.partition(maxima, blocks - k)[blocks - k])
    few = values[some]
    return some[few >= np.partition(few, len(few) - k)[len(few) - k]]


def nucleus(weights: Row, share: float) -> Ids:
    """Return the indices, in ascending order, of the smallest set of weights that sums to at least
    ``share`` of the total (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751). The set is
    never empty. Of equal weights, those with lower indices are kept."""
    total = float(weights.sum(dtype=np.float64))
    # The weights below this bound sum to less than the mass that may be left out.
    some = weights[weights >= min((1 - share) * total / len(weights), float(weights.max()))]
    least, count = share * total, 0
    while len(some) > _FEW:
        # The bit patterns of positive floats sort in the same order as the floats.
        bits = some.view(np.int32)
        below = bits.max() - bits
        width = int(below.max()).bit_length()
        if width == 0:
            break
        bins = below >> max(width - _BIN_BITS, 0)
        sums = np.cumsum(np.bincount(bins, some))
        edge = min(int(np.searchsorted(sums, least)), len(sums) - 1)
        count += int(np.count_nonzero(bins < edge))
        least -= float(sums[edge - 1]) if edge else 0.0
        some = some[bins == edge]
    some = np.sort(some)[::-1]
    last = min(int(np.searchsorted(np.cumsum(some, dtype=np.float64), least)), len(some) - 1)
    places = np.flatnonzero(weights >= some[last])
    surplus = len(places) - (count + last + 1)
    if surplus > 0:
        equal = np.flatnonzero(weights[places] == some[last])
        places = np.delete(places, equal[-surplus:])
    return places


def place_of(weights: Row, uniform: float) -> int:
    """Return the first index at which the cumulative sum of the weights exceeds ``uniform`` (in [0,
    1)) times their total."""
    if len(weights) <= _FEW:
        return _first_above(np.cumsum(weights, dtype=np.float64), uniform)
    sums = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)), dtype=np.float64)
    block = _first_above(sums, uniform)
    before = sums[block - 1] if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    share = (uniform * sums[-1] - before) / (sums[block] - before)
    return block * _BLOCK + _first_above(inside, share)


def _first_above(sums: npt.NDArray[np.float64], share: float) -> int:
    """Return the first index at which a cumulative sum exceeds ``share`` of the last one. Rounding
    never selects an index after the last nonzero weight."""
    last = sums[-1]
    target = share * last
    return int(sums.searchsorted(target, "right") if target < last else sums.searchsorted(last))


def _chosen(ids: Ids | None, weights: Row, places: Ids) -> tuple[Ids, Row]:
    return (places if ids is None else ids[places]), weights[places]
