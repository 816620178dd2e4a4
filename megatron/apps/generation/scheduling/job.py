"""A request while it runs: what it wants computed next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from megatron.apps.generation.request import (
    GenerationRequest,
    TokenScore,
    Update,
)
from megatron.apps.generation.scheduling.pages import PagePool, prefix_digests
from megatron.apps.generation.step import (
    Runner,
    SequencePart,
    TargetScores,
)


class Job(ABC):
    """A request, the pages it uses, and how much of its prompt is computed.

    Attributes:
        number: that the engine gave it.
        source: the client and its request, between which turns are taken.
        prompt: what the decoder begins with.
        text_before: what the new text continues.
        rows: parts of a step that its new tokens take.
        long: see `SequencePart.long`.
        encoded: of a model with an encoder, the number of the encoded prompt.
        cached: tokens of the prompt that were found computed.
    """

    rows = 1

    def __init__(self, request: GenerationRequest, runner: Runner) -> None:
        self.request = request
        self.number = -1
        self.source: tuple[Hashable, Hashable] = (None, None)
        self.page_size = runner.page_size
        start = runner.start_token
        self.prompt = request.prompt if start is None else (start,)
        self.text_before = request.prompt if start is None else ()
        self.encoded: int | None = None
        self.cached = 0
        self._long_after = runner.long_after
        self.long = self.is_long(len(self.prompt))
        self._read_tokens = self.prompt
        self._digests: list[bytes] | None = None
        self._computed = 0
        self._pages: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self._prompt_scores: list[TokenScore] = []
        self._told = False

    @property
    def positions(self) -> int:
        """The most that are ever computed: the last new token is not."""
        return len(self.prompt) + max(self.request.stopping.max_new_tokens - 1, 0)

    @property
    def pages_needed(self) -> int:
        """At most, of the decoder."""
        return -(-self.positions // self.page_size) + self.pages_again

    @property
    def pages_again(self) -> int:
        """Pages in place of those of the prompt that others may read, if all is computed again."""
        again = self.is_long(self.positions) and not self.long
        return len(self.prompt) // self.page_size if again else 0

    def is_long(self, length: int) -> bool:
        """Whether a sequence of this length is computed as a long one."""
        return self._long_after is not None and length > self._long_after

    def admit(self, pool: PagePool) -> bool:
        """Takes all the pages that the job can ever need, those of a known prompt shared; False if
        they are not available yet."""
        if self._digests is None:
            self._digests = prefix_digests(
                self.prompt, self.page_size, self.long, self.request.adapter
            )
        digests, shared = self._digests, list[int]()
        if self.request.prompt_logprobs is None:
            # The last token is computed in any case: the logits after it are wanted.
            shared = pool.find(digests[: (len(self.prompt) - 1) // self.page_size])
        needed = self.pages_needed - len(shared)
        if needed > pool.available - pool.idle_among(shared):
            return False
        pool.share(shared)
        self._pages = shared + pool.take(needed)
        for place in range(len(shared), len(digests)):
            pool.publish(self._pages[place], digests[place], self.number)
        return True

    def release(self, pool: PagePool) -> None:
        """Gives its pages back."""
        pool.release(self._pages, self.number)
        self._pages = []

    @property
    def reading(self) -> bool:
        """Whether some of the prompt is not computed yet."""
        return self._computed < len(self._read_tokens)

    def read_again(self, tokens: tuple[int, ...]) -> None:
        """Computes a sequence that has become a long one from its first token."""
        # Others may read the pages of the prompt: those that are left for this take their places.
        pages, count = self._pages, self.pages_again
        if count:
            self._pages = pages[-count:] + pages[count:-count] + pages[:count]
        self.long, self._computed, self._read_tokens = True, 0, tokens
        self._copies = []  # of the short sequence's pages, if another job has computed its prompt

    def read(self, pool: PagePool, budget: int) -> SequencePart | None:
        """Up to ``budget`` further tokens of the prompt; None while another job computes them."""
        tokens, size, end = self._read_tokens, self.page_size, len(self._read_tokens)
        while self._skips(pool):
            self._computed += size
            self.cached += size
        first = last = self._computed
        while last < end and last - first < budget:
            page = self._pages[last // size]
            # A page that somebody has filled meanwhile must not be written.
            if last % size == 0 and (pool.is_filled(page) or not pool.claim(page, self.number)):
                break
            last = min(last - last % size + size, end, first + budget)
        if last == first:
            return None
        wanted = self.request.prompt_logprobs
        return SequencePart(
            tokens[first:last],
            first,
            tuple(self._pages[: -(-last // size)]),
            logits=last == end and self.request.stopping.max_new_tokens > 0,
            targets=() if wanted is None or self._told else tokens[first + 1 : last + 1],
            top=wanted or 0,
            encoded=self.encoded,
            long=self.long,
            adapter=self.request.adapter,
        )

    def _skips(self, pool: PagePool) -> bool:
        place, inside = divmod(self._computed, self.page_size)
        return not inside and self.reading and pool.is_filled(self._pages[place])

    def has_read(self, part: SequencePart, scores: TargetScores | None, pool: PagePool) -> None:
        """Notes that a part of the prompt is computed."""
        size = self.page_size
        self._computed += len(part.tokens)
        for place in range(part.start // size, self._computed // size):
            pool.fill(self._pages[place])
        if scores is not None:
            self._prompt_scores += scores_of_targets(part.targets, scores)

    def follows(self, other: Job, pool: PagePool) -> bool:
        """Whether all that it waits for is what another job, without an encoder, computes: the
        logits after a prompt, and pages that it can copy."""
        return (
            self.request.prompt_logprobs is None
            and self.request.adapter == other.request.adapter
            and self._read_tokens == other._read_tokens == self.prompt
            and min(each.request.stopping.max_new_tokens for each in (self, other)) > 0
            and all(pool.is_private(page) for _, page in self._differing(other))
        )

    def adopt(self, other: Job) -> None:
        """Takes over the prompt that another job has computed."""
        self._copies += self._differing(other)
        self._computed = self.cached = len(self.prompt)

    def _differing(self, other: Job) -> list[tuple[int, int]]:
        count = -(-len(self.prompt) // self.page_size)
        pages = zip(other._pages[:count], self._pages[:count], strict=True)
        return [(its, own) for its, own in pages if its != own]

    def decoded(self, token: int, position: int, pages: tuple[int, ...]) -> SequencePart:
        """The part of a new token."""
        return SequencePart(
            (token,), position, pages, True, True, encoded=self.encoded, long=self.long,
            adapter=self.request.adapter,
        )  # fmt: skip

    @abstractmethod
    def parts(self) -> list[SequencePart]:
        """New tokens to compute, a part each; the prompt is computed."""

    def copies(self) -> Sequence[tuple[int, int]]:
        """Pages that are copied before these parts; asked once."""
        copies, self._copies = self._copies, []
        return copies

    @abstractmethod
    def take(self, logits_RV: Tensor) -> Update | None:
        """Takes the logits after the prompt, or after each of its parts; returns what is new, if
        anything is. Raises whatever makes the request fail."""

    def update(self, **fields: Any) -> Update:
        """Something new, and what is known of the prompt the first time."""
        if self._told:
            return Update(self.number, **fields)
        self._told = True
        return Update(
            self.number, prompt_scores=tuple(self._prompt_scores), cached=self.cached, **fields
        )


def scores_of_targets(targets: Sequence[int], scores: TargetScores) -> list[TokenScore]:
    """Those that a model computed of the targets of a part."""
    return [
        TokenScore(token, logprob, tuple(zip(top, top_logprobs, strict=True)))
        for token, logprob, top, top_logprobs in zip(
            targets,
            scores.logprobs.tolist(),
            scores.top_tokens.tolist(),
            scores.top_logprobs.tolist(),
            strict=True,
        )
    ]
