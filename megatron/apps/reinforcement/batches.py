"""Micro batches of episodes.

Shapes: B episodes, S positions of the model's input, P predicted tokens of an episode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron.apps.reinforcement.episodes import Episode, EpisodeBatch
from megatron.apps.reinforcement.exact.layout import laid_out
from megatron.apps.reinforcement.kept import RatedText
from megatron.data.gpt_batch import GPTBatch
from megatron.data.texts import padded


def rows_of(episodes: Sequence[Episode], multiple: int = 1, longest: int | None = None) -> GPTBatch:
    """Build a GPT batch from episodes. The targets are the policy's tokens.

    Rows are padded on the right to a multiple of ``multiple``, but at most to ``longest``.
    ``positions_BP`` lists the positions of each row's targets first, then others as padding."""
    whole = [np.concatenate((each.prompt.tokens, each.tokens_L)) for each in episodes]
    length = -(-max(len(row) - 1 for row in whole) // multiple) * multiple
    length = length if longest is None else min(length, longest)
    mask_BS = np.zeros((len(whole), length), np.float32)
    for mask_S, each in zip(mask_BS, episodes, strict=True):
        before = len(each.prompt.tokens) - 1
        mask_S[before : before + len(each.own_L)] = each.own_L
    most = max(1, int(mask_BS.sum(1).max()))
    positions_BP = np.argsort(mask_BS == 0, axis=1, kind="stable")[:, :most]
    tokens, labels = (
        torch.from_numpy(padded(rows, length))
        for rows in ([row[:-1] for row in whole], [row[1:] for row in whole])
    )
    return GPTBatch(
        tokens,
        labels,
        torch.from_numpy(mask_BS),
        position_ids_BS=None,
        document_ids_BS=None,
        positions_BP=torch.from_numpy(positions_BP.copy()),
    )


class Shapes(NamedTuple):
    """Rules for the shapes of micro batches of episodes.

    Attributes:
        multiple: row lengths are rounded up to a multiple of this.
        positions: maximum sequence length of the model.
        padded: row rule of a model whose training forward pass is bitwise equal to generation;
            None for other models.
        alike: whether all batches of a step have the same shape, as pipeline parallelism
            requires.
    """

    multiple: int
    positions: int
    padded: Callable[[int], int] | None
    alike: bool

    def batches(
        self, written: Sequence[Sequence[RatedText]], shares: Sequence[float] = ()
    ) -> list[EpisodeBatch]:
        """Build micro batches, one for each sequence of completions in ``written``. ``shares``
        contains, for each micro batch, its number of tokens in the loss divided by the step's
        mean."""
        batches = [self._batch(texts) for texts in written]
        if self.alike:
            longest = max(batch.tokens_BS.shape[1] for batch in batches)
            batches = [batch.lengthened(longest) for batch in batches]
            if self.padded is not None:
                count = max(batch.answers.tokens_1T.shape[1] for batch in batches)
                batches = [batch._replace(answers=batch.answers.filled(count)) for batch in batches]
        if not shares:
            return batches
        return [
            batch._replace(weights_2=torch.tensor([1.0, share], dtype=torch.float64))
            for batch, share in zip(batches, shares, strict=True)
        ]

    def plain(self, written: Sequence[Sequence[RatedText]]) -> list[EpisodeBatch]:
        """Build the same micro batches as ordinary padded batches, without the row rule."""
        return self._replace(padded=None).batches(written)

    def _batch(self, texts: Sequence[RatedText]) -> EpisodeBatch:
        episodes = [text.episode for text in texts]
        rows = rows_of(episodes, self.multiple, self.positions)
        places_BP = rows.positions_BP
        assert places_BP is not None
        answers: Any = rows
        if self.padded is not None:
            answers = laid_out(episodes, rows, self.padded, self.positions)

        def at(values: Sequence[Any]) -> Tensor | None:
            if values[0] is None:
                return None
            placed_BS = torch.zeros(rows.tokens_BS.shape, dtype=torch.float32)
            if any(value.dtype == np.float64 for value in values):
                placed_BS = placed_BS.double()
            for row_S, places_P, value in zip(placed_BS, places_BP, values, strict=True):
                row_S[places_P[: len(value)]] = torch.from_numpy(np.ascontiguousarray(value))
            return placed_BS

        advantages_BS = at([text.advantages_L for text in texts])
        sampled_BS = at([each.log_probs_L[each.own_L] for each in episodes])
        assert advantages_BS is not None and sampled_BS is not None
        return EpisodeBatch(
            answers,
            advantages_BS,
            sampled_BS,
            at([text.old_L for text in texts]),
            at([text.reference_L for text in texts]),
            at([text.returns_L for text in texts]),
            at([text.values_L for text in texts]),
            torch.tensor([text.kept for text in texts]),
        )


def of_policy(values_BS: Tensor, batch: EpisodeBatch) -> list[np.ndarray]:
    """Return the values at the policy's tokens, a NumPy array [L] for each episode."""
    rows = getattr(batch.answers, "rows", batch.answers)
    counts = (rows.loss_mask_BS > 0).sum(1).tolist()
    picked_BP = values_BS.cpu().gather(1, rows.positions_BP).numpy()
    return [picked[:count] for picked, count in zip(picked_BP, counts, strict=True)]
