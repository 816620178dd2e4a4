"""Continues token sequences. Shapes: B rows of equal length, S positions, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron.config import ModelConfig
from megatron.inference.cache import KeyValueCache
from megatron.inference.sampling import Sampling
from megatron.model.layer_list import LayerStack, LayerState
from megatron.parallel.random import generator

OnToken = Callable[[int, int], None]
"""Called with the number of a prompt and each of its new tokens as soon as it is known."""


@dataclass(frozen=True)
class Continuation:
    """What was generated after one prompt.

    Attributes:
        tokens: the new token ids, without the end-of-document token.
        ended: whether the model ended the document itself.
    """

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
    """Continues each prompt up to ``max_new_tokens`` tokens, or to the end of its document.

    Prompts of equal length go through the model together; there is no padding, so that a prompt's
    continuation does not depend on the other prompts.

    Args:
        model: in evaluation mode, on one process.
        config: shape of the network.
        prompts: token ids of each prompt, at least one.
        max_new_tokens: most tokens to add.
        sampling: how tokens are chosen; row i draws from a generator of its own.
        eod: token that ends a document; None never ends one.
        batch_size: most prompts that go through the model together.
        on_token: called with each new token; the end-of-document token is left out.

    Raises:
        ValueError: a prompt is empty or holds an unknown id, or it gets longer than the model's
            positions.
    """
    for number, prompt in enumerate(prompts):
        _check(config, prompt, number, max_new_tokens)
    found: dict[int, Continuation] = {}
    for rows in batches_of_equal_length(prompts, batch_size):
        generators = [generator(sampling.seed, f"row {row}") for row in rows]
        choose = partial(sampling.choose, generators=generators)
        report = partial(_report, on_token, rows)
        batch = [prompts[row] for row in rows]
        continued = _continue(model, config, batch, max_new_tokens, choose, eod, report)
        found |= zip(rows, continued, strict=True)
    return [found[number] for number in range(len(prompts))]


def _report(on_token: OnToken | None, rows: Sequence[int], place: int, token: int) -> None:
    if on_token is not None:
        on_token(rows[place], token)


def batches_of_equal_length(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Numbers of the prompts that go through the model together."""
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
            f"prompt {number} holds token id {foreign[0]}, outside the model's vocabulary of "
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
    """Continues prompts of equal length until every row has ended or is full."""
    new: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    cache = KeyValueCache(len(prompts[0]) + max_new_tokens)
    fed = prompts
    for _ in range(max_new_tokens):
        logits_BV = _next_logits(model, fed, cache)
        # The columns behind the vocabulary are padding of the token table.
        chosen = choose(logits_BV[:, : config.vocabulary.size])
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
    """Logits [B, V and padding] behind the tokens, which follow on what the cache holds."""
    device = next(model.parameters()).device
    tokens_BS = torch.tensor(fed, device=device)
    start = cache.length
    positions_S = torch.arange(start, start + tokens_BS.shape[1], device=device)
    positions_BS = positions_S.expand_as(tokens_BS)
    return model(LayerState(tokens_BS, position_ids=positions_BS, cache=cache)).hidden[:, -1]
