"""Refuses what can never be generated."""

from __future__ import annotations

from collections.abc import Collection

from megatron.apps.generation.request import GenerationRequest
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.generation.step import Runner


def check_request(request: GenerationRequest, runner: Runner) -> None:
    """Raises ValueError if a model can never do what is asked: an empty prompt, a token that it
    does not have, more positions than it has, or what does not go together."""
    prompt = request.prompt
    if not prompt:
        raise ValueError("the prompt is empty; start from the end-of-document token instead")
    _check_tokens("the prompt", prompt, runner.vocab_size)
    _check_tokens("the bias", request.sampling.bias, runner.vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(request, name)
        if count is not None and not 0 <= count <= runner.vocab_size:
            raise ValueError(f"{name} {count} must be from 0 to {runner.vocab_size:,}")
    if request.adapter is not None and request.adapter not in runner.adapters:
        known = ", ".join(runner.adapters) or "no adapters"
        raise ValueError(f"there is no adapter {request.adapter!r}; the model has {known}")
    _check_positions(request, runner)
    if request.beams is not None:
        _check_beams(request, runner)


def check_room(
    request: GenerationRequest, rows: int, pages: int, runner: Runner, limits: EngineLimits
) -> None:
    """Raises ValueError if a request needs more texts at once, or more pages, than there are."""
    if rows > limits.running:
        raise ValueError(
            f"{rows} beams are more than the {limits.running} texts that may run at once"
        )
    if pages > runner.pages:
        raise ValueError(
            f"a prompt of {len(request.prompt):,} tokens and {request.stopping.max_new_tokens:,} "
            f"new ones need {pages:,} pages of {runner.page_size} positions; there is memory for "
            f"{runner.pages:,}"
        )


def _check_tokens(where: str, tokens: Collection[int], vocab_size: int) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        foreign = next(token for token in tokens if not 0 <= token < vocab_size)
        raise ValueError(
            f"{where} has token id {foreign}, outside the model's vocabulary of {vocab_size:,}"
        )


def _check_positions(request: GenerationRequest, runner: Runner) -> None:
    prompt, new = len(request.prompt), request.stopping.max_new_tokens
    if runner.max_prompt is None:
        if prompt + new > runner.max_positions:
            raise ValueError(
                f"a prompt of {prompt:,} tokens and {new:,} new ones are more than the model's "
                f"{runner.max_positions:,} positions"
            )
        return
    if prompt > runner.max_prompt:
        raise ValueError(
            f"a prompt of {prompt:,} tokens is longer than the {runner.max_prompt:,} that the "
            "model's encoder takes"
        )
    if 1 + new > runner.max_positions:
        raise ValueError(
            f"a start token and {new:,} new ones are more than the {runner.max_positions:,} "
            "positions of the model's decoder"
        )
    if request.prompt_logprobs is not None:
        raise ValueError(
            "an encoder reads the prompt and does not predict it: it has no log-probabilities"
        )


def _check_beams(request: GenerationRequest, runner: Runner) -> None:
    prompt, new, long = len(request.prompt), request.stopping.max_new_tokens, runner.long_after
    if request.constraint is not None:
        raise ValueError("a beam search cannot be constrained")
    if long is not None and prompt <= long < prompt + new - 1:
        raise ValueError(
            f"a prompt of {prompt:,} tokens and {new:,} new ones pass the {long:,} positions after "
            "which this model computes otherwise, which a beam search cannot; ask for at most "
            f"{long - prompt + 1:,} new ones"
        )
