"""Layout of a micro batch of texts as in generation: a single row of tokens, which consists of
parts of sequences whose keys and values are in pages.

A prompt that several texts share is computed once, and its keys and values are copied. The policy's
tokens are separate queries, as in decoding, where each was sampled. An environment's response,
together with the policy's token before it, is computed like a prompt, as in prefill.

Shapes: B texts, S positions of a text with its prompt, P predicted tokens of a text, T tokens of
the row, W positions that are written to pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron.apps.generation.execution.runner import PAGE_SIZE
from megatron.apps.generation.request import SequencePart
from megatron.apps.reinforcement.episodes import Episode

Ids = npt.NDArray[np.int64]


class RowLayout(NamedTuple):
    """Layout of the row of a micro batch.

    Attributes:
        parts: parts of all sequences, in row order.
        pages: number of pages.
        rows_W: indices in the row of the tokens whose keys and values are written, in the order of
            ``places_W``.
        places_W: destination of each write: page x page size + offset in the page.
        rows_BS: index in the row of each token of each text; arbitrary at padding.
        first_BS: True where the row's token was added for this text, False where the text reuses
            the prompt of an earlier one.
        padded: see :class:`~megatron.model.layer_list.LayerCache`.
        positions: maximum sequence length of the model.
    """

    parts: tuple[SequencePart, ...]
    pages: int
    rows_W: Tensor
    places_W: Tensor
    rows_BS: Tensor
    first_BS: Tensor
    padded: Callable[[int], int]
    positions: int

    def to(self, device: torch.device | str, non_blocking: bool = False) -> RowLayout:
        """Return the layout with its tensors on a device."""
        return RowLayout._make(
            part.to(device, non_blocking=non_blocking) if isinstance(part, Tensor) else part
            for part in self
        )


class PagedEpisodes(NamedTuple):
    """Micro batch of texts for a model that computes them in the same way as generation.

    Attributes:
        rows: the same texts as a batch of the model's family, with ``positions_BP``.
        tokens_1T: token ids of the row, padded on the right.
        targets_BP: index in the row of the token that predicts each target of ``rows``.
    """

    rows: Any
    tokens_1T: Tensor
    targets_BP: Tensor
    layout: RowLayout

    @property
    def tokens_BS(self) -> Tensor:
        """Token ids of the model's input, text by text."""
        return self.rows.tokens_BS

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PagedEpisodes:
        """Return the batch on a device."""
        return PagedEpisodes._make(part.to(device, non_blocking=non_blocking) for part in self)

    def lengthened(self, seq_length: int) -> PagedEpisodes:
        """Return the batch with every text padded to ``seq_length`` tokens. ``tokens_1T`` is
        unchanged."""
        missing = seq_length - self.tokens_BS.shape[1]
        rows_BS, first_BS = (
            torch.nn.functional.pad(each, (0, missing))
            for each in (self.layout.rows_BS, self.layout.first_BS)
        )
        layout = self.layout._replace(rows_BS=rows_BS, first_BS=first_BS)
        return self._replace(rows=self.rows.lengthened(seq_length), layout=layout)

    def filled(self, count: int) -> PagedEpisodes:
        """Return the batch with its row padded to ``count`` tokens."""
        missing = count - self.tokens_1T.shape[1]
        return self._replace(tokens_1T=torch.nn.functional.pad(self.tokens_1T, (0, missing)))


@dataclass
class _Row:
    """Row under construction: its tokens, parts and pages."""

    size: int

    def __post_init__(self) -> None:
        self.tokens: list[int] = []
        self.parts: list[SequencePart] = []
        self.rows: list[int] = []
        self.places: list[int] = []
        self.pages = 0

    def new_pages(self, count: int) -> tuple[int, ...]:
        self.pages += count
        return tuple(range(self.pages - count, self.pages))

    def add(
        self, tokens: Sequence[int], start: int, pages: tuple[int, ...], decoding: bool
    ) -> list[int]:
        """Append a part of a sequence that begins at position ``start``, and return the indices of
        its tokens in the row."""
        first, end = len(self.tokens), start + len(tokens)
        self.tokens += tokens
        rows = list(range(first, first + len(tokens)))
        used = pages[: -(-end // self.size)]
        self.parts.append(SequencePart(tuple(tokens), start, used, decoding))
        self.write(rows, start, pages)
        return rows

    def write(self, rows: Sequence[int], start: int, pages: tuple[int, ...]) -> None:
        """Record that tokens of the row are written to pages, at positions from ``start``."""
        self.rows += rows
        positions = range(start, start + len(rows))
        self.places += [pages[at // self.size] * self.size + at % self.size for at in positions]


def laid_out(
    episodes: Sequence[Episode],
    rows: Any,
    padded: Callable[[int], int],
    positions: int,
    size: int = PAGE_SIZE,
) -> PagedEpisodes:
    """Lay out the episodes of a micro batch in one row.

    Args:
        rows: the texts as a batch of the family, with ``positions_BP``.
        padded: the row rule of the model.
        positions: maximum sequence length of the model.
        size: positions per page.
    """
    row = _Row(size)
    rows_BS = np.zeros(rows.tokens_BS.shape, np.int64)
    first_BS = np.zeros(rows.tokens_BS.shape, np.bool_)
    prompts: dict[bytes, list[int]] = {}
    for number, episode in enumerate(episodes):
        prompt = episode.prompt.tokens.tolist()
        key = episode.prompt.tokens.tobytes()
        length = len(prompt)
        parts = list(segments(episode))
        end = length + (parts[-1][1] if parts else 0)
        fresh = key not in prompts
        if fresh:
            pages = row.new_pages(-(-max(end, length) // size))
            prompts[key] = row.add(prompt, 0, pages, False)
        read = prompts[key]
        if not fresh:
            # Copy the prompt instead of sharing its pages, since consecutive pages are read
            # together.
            pages = row.new_pages(-(-end // size))
            row.write(read[: len(pages) * size], 0, pages)
        rows_BS[number, :length] = read
        first_BS[number, :length] = fresh
        tokens = episode.tokens_L.tolist()
        for begin, stop, decoding in parts:
            rows_BS[number, length + begin : length + stop] = row.add(
                tokens[begin:stop], length + begin, pages, decoding
            )
            first_BS[number, length + begin : length + stop] = True
    count = padded(len(row.tokens))
    tokens_1T = np.zeros((1, count), np.int64)
    tokens_1T[0, : len(row.tokens)] = row.tokens
    layout = RowLayout(
        tuple(row.parts),
        row.pages,
        torch.tensor(row.rows),
        torch.tensor(row.places),
        torch.from_numpy(rows_BS),
        torch.from_numpy(first_BS),
        padded,
        positions,
    )
    targets_BP = layout.rows_BS.gather(1, rows.positions_BP)
    return PagedEpisodes(rows, torch.from_numpy(tokens_1T), targets_BP, layout)


def segments(episode: Episode) -> Iterator[tuple[int, int, bool]]:
    """Yield (begin, end, whether its tokens are decoded one by one) for each part after the prompt
    that the model reads. The last token of a turn of the policy is read only if a response follows.
    The last predicted token and everything after it are not read."""
    own = np.flatnonzero(episode.own_L)
    if not len(own):
        return
    last = int(own[-1])
    begin = 0
    while begin < last:
        drawn = bool(episode.own_L[begin])
        if drawn:
            end = begin
            while end < last and episode.own_L[end + 1]:
                end += 1
            # The last token of a turn is computed together with the response.
            if end > begin:
                yield begin, end, True
            begin = end
            if begin >= last:
                return
        end = begin + 1
        while not episode.own_L[end]:
            end += 1
        yield begin, end, False
        begin = end
