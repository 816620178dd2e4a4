"""Drafts by a model's own blocks of multi-token prediction.

At the place of a token the block number d reads that token and the state of block d - 1 at the
place before, of the model itself after its final norm for d = 0, and predicts the next token. So
what a page keeps depends on the tokens up to its end only, and is shared with the page. Of N drafts
the first is that of block 0, and the n-th that of block n - 1, or of the last one, whose input is
then its own output, as in DeepSeek-V3 and vLLM.

Drafts change no text, so that nothing here needs to be the same to the last bit.

Shapes: T tokens of a pass, H hidden, B parts, D blocks ahead, X pages, P positions of a page, M
positions of a page whose states are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from megatron.apps.generation.execution.adapters import ServedAdapters
from megatron.apps.generation.execution.paged_attention import PagedCache
from megatron.apps.generation.execution.stages import Head, StagedLayers
from megatron.apps.generation.memory import PageMemory
from megatron.apps.generation.request import SequencePart
from megatron.model.layer_list import LayerState

Parts = Sequence[SequencePart]
Drafts = tuple[tuple[int, ...], ...]


class BlocksAhead:
    """Drafts of up to ``most`` tokens for the parts of each step, on every rank of the model; the
    last pipeline stage computes them.

    It keeps the inputs of each block at the last M = ``most`` + 1 places of each page that have
    been computed: those that a step reads, after the drafts of the step before that were wrong, and
    the end of each full page, after which another text may continue.
    """

    def __init__(
        self,
        stages: StagedLayers,
        head: Head | None,
        memory: PageMemory,
        positions: int,
        most: int,
        padded: Callable[[int], int],
        adapters: ServedAdapters | None,
    ) -> None:
        self._stages, self._head, self._memory = stages, head, memory
        self._positions, self._padded, self._adapters = positions, padded, adapters
        self._blocks = [stages.last_part(layers) for layers in stages.ahead if stages.last]
        size = (len(self._blocks), memory.pages, most + 1, stages.hidden)
        self._inputs_DXMH = torch.zeros(size, dtype=stages.dtype, device=stages.device)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Pages (from, to), in order."""
        for source, target in copies:
            self._inputs_DXMH[:, target] = self._inputs_DXMH[:, source]

    def extended(self, parts: Parts) -> tuple[list[SequencePart], Drafts]:
        """Return the parts of a step with their drafts, and the drafts for parts that request them;
        every rank must call it."""
        asking = [part for part in parts if part.drafts]
        tokens = torch.empty(sum(p.drafts for p in asking), dtype=torch.int64)
        tokens = tokens.to(self._stages.device)
        if asking and self._blocks:
            tokens.copy_(torch.tensor([token for row in self._drafted(asking) for token in row]))
        if asking:
            self._stages.share(tokens, self._stages.layers - 1)
        flat, ends = tokens.tolist(), list(accumulate(part.drafts for part in asking))
        rows = [tuple(flat[end - p.drafts : end]) for p, end in zip(asking, ends, strict=True)]
        drafts = iter(rows)
        whole = [
            replace(p, tokens=(*p.tokens, *next(drafts)), drafts=0, before=()) if p.drafts else p
            for p in parts
        ]
        return whole, tuple(rows)

    def read(self, parts: Parts, x_TH: Tensor) -> None:
        """Reads the states of the model after a step with these parts; of prompts the blocks
        compute what later tokens attend to."""
        rows = x_TH.split([len(part.tokens) for part in parts])
        both = list(zip(parts, rows, strict=True))
        decoded = [pair for pair in both if pair[0].decoding]
        prompts = [pair for pair in both if not pair[0].decoding]
        if decoded:
            self._keep(0, [part for part, _ in decoded], torch.cat([x for _, x in decoded]))
        if prompts:
            self._filled([part for part, _ in prompts], torch.cat([x for _, x in prompts]))

    def _drafted(self, parts: Parts) -> list[list[int]]:
        """The drafts of each part."""
        assert self._head is not None
        # Where the last step had drafts that were right, their inputs were drafts too.
        known = [
            replace(p, tokens=(*p.before, *p.tokens), start=p.start - len(p.before)) for p in parts
        ]
        ends = np.cumsum([len(part.tokens) for part in known]) - 1
        x_BH = self._filled(known)[torch.from_numpy(ends).to(self._stages.device)]
        drafts: list[list[int]] = [[] for _ in parts]
        rows = list(range(len(parts)))
        for number in range(max(part.drafts for part in parts)):
            if number:
                keep = [place for place, row in enumerate(rows) if parts[row].drafts > number]
                rows, x_BH = [rows[place] for place in keep], x_BH[keep]
                last = [
                    replace(parts[row], tokens=(drafts[row][-1],), start=parts[row].start + number)
                    for row in rows
                ]
                x_BH = self._applied(min(number, len(self._blocks) - 1), last, x_BH)
            for row, token in zip(rows, self._head.best(x_BH[None]).tolist(), strict=True):
                drafts[row].append(token)
        return drafts

    def _filled(self, parts: Parts, x_TH: Tensor | None = None) -> Tensor:
        """[T, H] of the first block over whole parts, after the states of the model there; without
        them those that are kept. All blocks compute and keep what later tokens read."""
        known = x_TH is None
        if x_TH is None:
            x_TH = self._inputs_DXMH[0].flatten(0, 1)[self._places(parts)]
        first_TH: Tensor | None = None
        for depth in range(len(self._blocks)):
            before_TH = self._shifted(depth, parts, x_TH)
            if depth or not known:
                self._keep(depth, parts, x_TH)
            x_TH = self._applied(depth, parts, before_TH)
            first_TH = x_TH if first_TH is None else first_TH
        assert first_TH is not None
        return first_TH

    def _shifted(self, depth: int, parts: Parts, x_TH: Tensor) -> Tensor:
        """[T, H] of the place before each."""
        before = [replace(p, tokens=(0,), start=max(p.start - 1, 0)) for p in parts]
        firsts_BH = self._inputs_DXMH[depth].flatten(0, 1)[self._places(before)].to(x_TH.dtype)
        rows = x_TH.split([len(part.tokens) for part in parts])
        pairs = zip(firsts_BH.split(1), rows, strict=True)
        return torch.cat([each for first, x in pairs for each in (first, x[:-1])])

    def _keep(self, depth: int, parts: Parts, x_TH: Tensor) -> None:
        """Keeps the inputs at the last places of each page."""
        M, P = self._inputs_DXMH.shape[2], self._memory.shape.positions
        kept = []
        for part in parts:
            end = part.start + len(part.tokens)
            at = np.arange(part.start, end)
            kept.append(at + M >= np.minimum(end, at - at % P + P))
        kept_T = torch.from_numpy(np.concatenate(kept)).to(x_TH.device)
        pool = self._inputs_DXMH[depth].view(-1, x_TH.shape[-1])
        pool.index_copy_(0, self._places(parts)[kept_T], x_TH[kept_T].to(pool.dtype))

    def _places(self, parts: Parts) -> Tensor:
        """Places of the inputs of each token, in X x M."""
        M, P = self._inputs_DXMH.shape[2], self._memory.shape.positions
        places = []
        for part in parts:
            at = np.arange(part.start, part.start + len(part.tokens))
            places.append(np.array(part.pages)[at // P] * M + at % P % M)
        return torch.from_numpy(np.concatenate(places)).to(self._stages.device)

    def _applied(self, depth: int, parts: Parts, x_TH: Tensor) -> Tensor:
        """[T, H] of a block over tokens and the states before them."""
        count = len(x_TH)
        cache = PagedCache(
            self._memory, parts, count, self._positions, {}, None, self._padded, unseen=depth + 1
        )
        if self._adapters is not None:
            self._adapters.begin(parts, count)
        tokens = [token for part in parts for token in part.tokens]
        tokens_1T = torch.tensor([tokens], device=x_TH.device)
        places_1T = cache.position_ids_BS
        ahead = LayerState(tokens_1T, position_ids=places_1T)
        state = LayerState(
            x_TH[None],
            position_ids=(places_1T - 1 - depth).clamp(min=0),
            cache=cache,
            ahead=(ahead,) * (depth + 1),
        )
        return self._blocks[depth](state).total[0]
