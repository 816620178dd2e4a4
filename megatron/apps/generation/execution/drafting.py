"""Drafts from the model's own blocks of multi-token prediction (MTP), for speculative decoding.

At each position block d reads the token and the hidden state of block d - 1 at the previous
position, and predicts the next token. For d = 0 the hidden state is the model's own, after its
final norm. So the cached contents of a page depend only on the tokens up to its end, and are shared
with the page. Draft n of N comes from block n - 1; once there are no more blocks, the last one is
applied again to its own output, as in DeepSeek-V3 and vLLM.

Drafts do not change the text, so they need not be bitwise reproducible.

Shapes: T tokens of a pass, H hidden, B parts, D MTP blocks, X pages, P positions of a page, M
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
    """Drafter of up to ``most`` tokens for each part of a step. Every rank of the model has one;
    the last pipeline stage computes the drafts.

    It stores the inputs of each MTP block for the last M = ``most`` + 1 computed positions of each
    page. A step reads them again after rejected drafts, and when a sequence begins with a full page
    that another sequence computed.
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
        """Copy the stored states of pages. ``copies`` are pairs (from, to), applied in order."""
        for source, target in copies:
            self._inputs_DXMH[:, target] = self._inputs_DXMH[:, source]

    def extended(self, parts: Parts) -> tuple[list[SequencePart], Drafts]:
        """Return the parts of a step with their drafts appended, and the drafts of each part that
        requests them. Collective: every rank must call it."""
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
        """Store the model's hidden states after a step with these parts. For prompts, also run the
        MTP blocks, to cache the keys and values that later tokens attend to."""
        rows = x_TH.split([len(part.tokens) for part in parts])
        both = list(zip(parts, rows, strict=True))
        decoded = [pair for pair in both if pair[0].decoding]
        prompts = [pair for pair in both if not pair[0].decoding]
        if decoded:
            self._keep(0, [part for part, _ in decoded], torch.cat([x for _, x in decoded]))
        if prompts:
            self._filled([part for part, _ in prompts], torch.cat([x for _, x in prompts]))

    def _drafted(self, parts: Parts) -> list[list[int]]:
        """Return the drafted tokens of each part."""
        assert self._head is not None
        # The cached entries of accepted drafts were computed from drafted states: recompute them.
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
        """Run all MTP blocks on whole parts, and cache what later tokens attend to. Return the
        output [T, H] of the first block. ``x_TH`` contains the model's hidden states; None uses the
        stored ones."""
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
        """Return the block inputs [T, H] at the position before each token."""
        before = [replace(p, tokens=(0,), start=max(p.start - 1, 0)) for p in parts]
        firsts_BH = self._inputs_DXMH[depth].flatten(0, 1)[self._places(before)].to(x_TH.dtype)
        rows = x_TH.split([len(part.tokens) for part in parts])
        pairs = zip(firsts_BH.split(1), rows, strict=True)
        return torch.cat([each for first, x in pairs for each in (first, x[:-1])])

    def _keep(self, depth: int, parts: Parts, x_TH: Tensor) -> None:
        """Store the block inputs ``x_TH`` of the last M positions of each page."""
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
        """Return the indices of the tokens' stored inputs in the flattened X x M storage."""
        M, P = self._inputs_DXMH.shape[2], self._memory.shape.positions
        places = []
        for part in parts:
            at = np.arange(part.start, part.start + len(part.tokens))
            places.append(np.array(part.pages)[at // P] * M + at % P % M)
        return torch.from_numpy(np.concatenate(places)).to(self._stages.device)

    def _applied(self, depth: int, parts: Parts, x_TH: Tensor) -> Tensor:
        """Run one MTP block on tokens, given the hidden state before each. Return [T, H]."""
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
