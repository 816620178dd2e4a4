"""Continues token sequences.

Shapes: B rows of equal length, S new positions, T all positions, V vocabulary, K key and value
heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.inference.request import Sampling
from megatron.inference.sampling import TokenSampler, choose_tokens
from megatron.model.attention_backends import sdpa
from megatron.model.attention_masks import AttentionMasks, AttentionScoring
from megatron.model.layer_list import LayerStack, LayerState
from megatron.parallel.random import derive_seed

OnToken = Callable[[int, int], None]
"""Called with the index of a prompt and each of its new tokens."""


@dataclass(frozen=True)
class Continuation:
    """The new token ids after one prompt, without an end-of-document token, and whether the model
    ended the document."""

    tokens: list[int]
    ended: bool


@torch.inference_mode()
def generate(
    model: LayerStack,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    eod: int | None = None,
    batch_size: int = 8,
    on_token: OnToken | None = None,
) -> list[Continuation]:
    """Continues each prompt up to ``max_new_tokens`` tokens, or to the end of its document
    (``eod``). ``model`` must be in evaluation mode, on one process.

    Prompts of equal length go through the model together, at most ``batch_size`` at a time, without
    padding, so that a continuation does not depend on other prompts. ``on_token`` gets each new
    token except ``eod``. Raises ValueError if a prompt is empty, has an unknown id, or exceeds the
    model's positions.
    """
    for number, prompt in enumerate(prompts):
        _check(config, prompt, number, max_new_tokens)
    found: dict[int, Continuation] = {}
    for rows in batches_of_equal_length(prompts, batch_size):
        samplers = [
            TokenSampler(replace(sampling, seed=derive_seed(sampling.seed, row)), prompts[row])
            for row in rows
        ]
        choose = partial(choose_tokens, samplers)

        def report(place: int, token: int, rows: list[int] = rows) -> None:
            if on_token is not None:
                on_token(rows[place], token)

        batch = [prompts[row] for row in rows]
        continued = _continue(model, config, batch, max_new_tokens, choose, eod, report)
        found |= zip(rows, continued, strict=True)
    return [found[number] for number in range(len(prompts))]


def batches_of_equal_length(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Indices of the prompts that go through the model together."""
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    return [
        rows[first : first + batch_size]
        for rows in by_length.values()
        for first in range(0, len(rows), batch_size)
    ]


def _check(config: ModelConfig, prompt: Sequence[int], number: int, max_new_tokens: int) -> None:
    if not prompt:
        raise ValueError(f"prompt {number} is empty; start from the end-of-document token instead")
    foreign = [i for i in prompt if not 0 <= i < config.vocabulary.size]
    if foreign:
        raise ValueError(
            f"prompt {number} has token id {foreign[0]}, outside the model's vocabulary of "
            f"{config.vocabulary.size:,}"
        )
    room = config.positions.max_position_embeddings - len(prompt)
    if max_new_tokens > room:
        advice = f"at most --max-new-tokens {room}" if room > 0 else "shorten the prompt"
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} after a prompt of {len(prompt)} tokens is more "
            f"than the model's {config.positions.max_position_embeddings} positions "
            f"(--max-position-embeddings): {advice}"
        )


def _continue(
    model: LayerStack,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    choose: Callable[[Tensor], list[int]],
    eod: int | None,
    report: OnToken,
) -> list[Continuation]:
    new: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    cache = KeyValueCache(len(prompts[0]) + max_new_tokens)
    fed = prompts
    for _ in range(max_new_tokens):
        logits_BV = _next_logits(model, fed, cache)
        # The columns after the vocabulary are padding of the token embedding.
        chosen = choose(logits_BV[:, : config.vocabulary.size].float().cpu())
        for row, token in enumerate(chosen):
            ended[row] |= token == eod
            if not ended[row]:
                new[row].append(token)
                report(row, token)
        if all(ended):
            break
        fed = [[token] for token in chosen]
    return [Continuation(*row) for row in zip(new, ended, strict=True)]


def _next_logits(model: LayerStack, fed: Sequence[Sequence[int]], cache: KeyValueCache) -> Tensor:
    device = next(model.parameters()).device
    tokens_BS = torch.tensor(fed, device=device)
    start = cache.length
    positions_S = torch.arange(start, start + tokens_BS.shape[1], device=device)
    positions_BS = positions_S.expand_as(tokens_BS)
    cache.lengths_BS = torch.full_like(tokens_BS, start + tokens_BS.shape[1])
    return model(LayerState(tokens_BS, position_ids=positions_BS, cache=cache)).hidden[:, -1]


class KeyValueCache:
    """Keys and values of the positions that a model has seen, for one batch; it grows as needed."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._layers: dict[int, _CachedLayer] = {}

    @property
    def length(self) -> int:
        """Positions of the first layer, and so the position of the next token."""
        return self._layers[0].length if self._layers else 0

    lengths_BS: Tensor
    positions = 0

    def attend(
        self,
        layer: int,
        q_BSND: Tensor,
        k_BSKD: Tensor,
        v_BSKD: Tensor,
        scores: AttentionScoring,
        bias_NT: Tensor | None,
    ) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_BSND, k_BSKD, v_BSKD))
        keys, values = self.extend(layer, k, v)
        return sdpa(q, keys, values, scores, AttentionMasks(), 0.0, bias_NT).transpose(1, 2)

    def attend_encoded(self, layer: int, q_BSND: Tensor, *_: object) -> Tensor:
        raise AssertionError("no encoder")

    def extend(self, layer: int, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values of S new positions of a block; returns those of all T positions
        so far, each [B, K, T, D], as views of the cache."""
        if layer not in self._layers:
            k, v = _memory(k_BKSD, self.capacity), _memory(v_BKSD, self.capacity)
            self._layers[layer] = _CachedLayer(k, v)
        held = self._layers[layer]
        start, end = held.length, held.length + k_BKSD.shape[2]
        if end > held.k.shape[2]:
            held.k, held.v = _grown(held.k, start, end), _grown(held.v, start, end)
        held.k[:, :, start:end] = k_BKSD
        held.v[:, :, start:end] = v_BKSD
        held.length = end
        return held.k[:, :, :end], held.v[:, :, :end]


@dataclass
class _CachedLayer:
    """Memory of one layer, [B, K, capacity, D] each, with ``length`` positions in use."""

    k: Tensor
    v: Tensor
    length: int = 0


def _memory(x_BKSD: Tensor, positions: int) -> Tensor:
    batch, heads, _, width = x_BKSD.shape
    return x_BKSD.new_empty(batch, heads, positions, width)


def _grown(held: Tensor, used: int, needed: int) -> Tensor:
    """A copy of at least twice the capacity, so that copying stays linear in the length."""
    grown = _memory(held, max(needed, 2 * held.shape[2]))
    grown[:, :, :used] = held[:, :, :used]
    return grown
