"""Texts to requests, and what a model adds to them back to text."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass

from megatron.apps.generation.decoding.text_stream import TextStream, continuation_text
from megatron.apps.generation.prompts import prompt_tokens
from megatron.apps.generation.request import (
    Completion,
    GenerationRequest,
    Sampling,
    StopRules,
)
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.parallel.random import derive_seed
from megatron.tokenizer import Tokenizer

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Continuation:
    """What was added to one prompt.

    Attributes:
        tokens: without what ended the text.
        ended: whether the model ended it.
        text: of the tokens.
        written: of the tokens and of what ended them.
        before: of the prompt's tokens; empty if an encoder reads them.
        read: the tokens of the prompt, of the text and of what ended it.
    """

    tokens: Tokens
    ended: bool
    text: str
    written: str
    before: str
    read: Tokens


class TextGenerator:
    """Continues texts up to a number of new tokens, or to the end of their document.

    Args:
        sampling: its seed and the place of a prompt determine the draws.
        ends: tokens that end a text.
        adapter: that the model has for all texts; None for none.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        tokenizer: Tokenizer,
        max_new_tokens: int,
        sampling: Sampling,
        ends: frozenset[int],
        adapter: str | None = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.stops, self.adapter = ends, adapter

    def encode(self, text: str) -> Tokens:
        """See :func:`~megatron.apps.generation.prompts.prompt_tokens`. Raises ValueError also if
        the prompt leaves no room for the new tokens."""
        runner, new = self.engine.runner, self.max_new_tokens
        prompt = prompt_tokens(self.tokenizer, text, runner)
        if runner.max_prompt is not None and len(prompt) > runner.max_prompt:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens is longer than the {runner.max_prompt} that the "
                "encoder reads: shorten the prompt"
            )
        before = len(prompt) if runner.max_prompt is None else 1
        room = runner.max_positions - before
        if new > room:
            advice = f"at most --max-new-tokens {room}" if room > 0 else "shorten the prompt"
            raise ValueError(
                f"--max-new-tokens {new} after a prompt of {before} tokens is more than the "
                f"model's {runner.max_positions} positions (--max-position-embeddings): {advice}"
            )
        return prompt

    def request(self, prompt: Tokens, *place: int) -> GenerationRequest:
        """The request of a prompt; another place gives other draws."""
        seed = derive_seed(self.sampling.seed, *place)
        sampling = dataclasses.replace(self.sampling, seed=seed)
        stopping = StopRules(self.max_new_tokens, self.stops)
        return GenerationRequest(prompt, stopping, sampling, adapter=self.adapter)

    def stream(self, prompt: Tokens, *place: int) -> Generator[str, None, Tokens]:
        """The text that is added to a prompt, in pieces as its tokens come; returns all tokens."""
        number = self.engine.submit(self.request(prompt, *place))
        text = TextStream(self.tokenizer, self._before(prompt))
        finish, added = None, list[int]()
        while finish is None:
            for update in self.engine.step():
                assert update.number == number
                if update.error is not None:
                    raise update.error
                finish = update.finish
                added += update.tokens
                tokens = update.tokens[:-1] if finish == "stop" else update.tokens
                yield "".join(map(text.add, tokens))
        yield text.close()
        return tuple(added)

    def continuations(self, prompts: Iterable[Tokens], *place: int) -> Iterator[Continuation]:
        """What is added to each, in their order."""
        known: list[Tokens] = []

        def requests() -> Iterator[GenerationRequest]:
            for number, prompt in enumerate(prompts):
                known.append(prompt)
                yield self.request(prompt, *place, number)

        for number, completion in enumerate(self.engine.completions(requests())):
            yield self.continuation(known[number], completion)

    def continuation(self, prompt: Tokens, completion: Completion) -> Continuation:
        """What a request of the prompt got, as text."""
        ended, before = completion.finish == "stop", self._before(prompt)
        tokens = completion.tokens[:-1] if ended else completion.tokens
        return Continuation(
            tokens,
            ended,
            continuation_text(self.tokenizer, before, tokens),
            continuation_text(self.tokenizer, before, completion.tokens),
            self.tokenizer.detokenize(before),
            (*before, *completion.tokens),
        )

    def _before(self, prompt: Tokens) -> Tokens:
        """The tokens that stand before the new ones; what an encoder reads does not."""
        return prompt if self.engine.runner.max_prompt is None else ()
