"""Requests while they run: the tokens to compute next, and the updates of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from megatron.apps.generation.decoding.beams import BeamSearch
from megatron.apps.generation.decoding.constraints import TokenConstraint
from megatron.apps.generation.decoding.drafts import PromptLookup
from megatron.apps.generation.decoding.sampling import TokenSampler, token_score
from megatron.apps.generation.decoding.text_stream import StopWatch
from megatron.apps.generation.request import (
    Finish,
    GenerationRequest,
    Runner,
    SequencePart,
    TargetScores,
    TokenScore,
    Update,
)
from megatron.apps.generation.scheduling.pages import PagePool, prefix_digests
from megatron.tokenizer import Tokenizer


class Job(ABC):
    """A request, its pages, and the computed part of its prompt.

    Attributes:
        number: assigned by the engine.
        source: the client and its request, between which turns are taken.
        prompt: the tokens with which the decoder begins.
        text_before: the tokens that the new text continues.
        rows: parts of a step that its new tokens take.
        long: see `SequencePart.long`.
        encoded: of a model with an encoder, the number of the encoded prompt.
        cached: tokens of the prompt that were found computed.
        slots: of a model with states, one for each of ``rows``; the prompt's is the first.
    """

    rows = 1

    def __init__(self, request: GenerationRequest, runner: Runner) -> None:
        self.request = request
        self.number = -1
        self.source: tuple[Hashable, Hashable] = (None, None)
        self.page_size, self._piece = runner.page_size, runner.piece
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
        self.slots: list[int] = []
        self._state_copies: list[tuple[int, int]] = []
        self._prompt_scores: list[TokenScore] = []
        self._told = False

    @property
    def _positions(self) -> int:
        """The most that are ever computed: the last new token is not."""
        return len(self.prompt) + max(self.request.stopping.max_new_tokens - 1, 0)

    @property
    def pages_needed(self) -> int:
        """Pages of the decoder at most."""
        return -(-self._positions // self.page_size) + self._pages_again

    @property
    def _pages_again(self) -> int:
        """Replace the prompt's pages that other requests may read, if everything is recomputed."""
        again = self.is_long(self._positions) and not self.long
        return len(self.prompt) // self.page_size if again else 0

    def is_long(self, length: int) -> bool:
        """True if a sequence of this length is computed as a long one."""
        return self._long_after is not None and length > self._long_after

    def admit(self, pool: PagePool) -> bool:
        """Takes all the pages and slots that the job can ever need, the pages of a known prompt
        shared; False if they are not available yet."""
        if self._digests is None and not pool.shares:
            self._digests = []
        if self._digests is None:
            self._digests = prefix_digests(
                self.prompt, self.page_size, self.long, self.request.adapter
            )
        digests, shared = self._digests, list[int]()
        if self.request.prompt_logprobs is None:
            # The last token is computed in any case, for the logits after it.
            shared = pool.find(digests[: (len(self.prompt) - 1) // self.page_size])
        needed = self.pages_needed - len(shared)
        if needed > pool.available - pool.idle_among(shared) or not pool.has_slots(self.rows):
            return False
        pool.share(shared)
        self.slots = pool.take_slots(self.rows)
        self._pages = shared + pool.take(needed)
        for place in range(len(shared), len(digests)):
            pool.publish(self._pages[place], digests[place], self.number)
        return True

    def release(self, pool: PagePool) -> None:
        """Gives its pages and slots back."""
        pool.release(self._pages, self.number)
        pool.release_slots(self.slots)
        self._pages, self.slots = [], []

    @property
    def reading(self) -> bool:
        """True if some of the prompt is not computed yet."""
        return self._computed < len(self._read_tokens)

    def read_again(self, tokens: tuple[int, ...]) -> None:
        """Computes a sequence that has become a long one from its first token."""
        # Others may read the pages of the prompt, which spare ones replace.
        pages, count = self._pages, self._pages_again
        if count:
            self._pages = pages[-count:] + pages[count:-count] + pages[:count]
        self.long, self._computed, self._read_tokens = True, 0, tokens
        # Of the short sequence's, if another job has computed its prompt.
        self._copies, self._state_copies = [], []

    def read(self, pool: PagePool, budget: int) -> SequencePart | None:
        """Return up to ``budget`` further tokens of the prompt, or one piece if that is longer;
        None while another job computes them."""
        tokens, size, end = self._read_tokens, self.page_size, len(self._read_tokens)
        while (
            self.reading
            and self._computed % size == 0
            and pool.is_filled(self._pages[self._computed // size])
        ):
            self._computed += size
            self.cached += size
        first = last = self._computed
        most = first + budget
        if most < end:
            most = max(most - most % self._piece, first + self._piece)
        while last < min(end, most):
            page = self._pages[last // size]
            # A page that another job has filled meanwhile must not be written.
            if last % size == 0 and (pool.is_filled(page) or not pool.claim(page, self.number)):
                break
            last = min(last - last % size + size, end, most)
        if last == first:
            return None
        top = self.request.prompt_logprobs
        return SequencePart(
            tokens[first:last],
            first,
            tuple(self._pages[: -(-last // size)]),
            logits=last == end and self.request.stopping.max_new_tokens > 0,
            targets=() if top is None or self._told else tokens[first + 1 : last + 1],
            top=top or 0,
            encoded=self.encoded,
            long=self.long,
            adapter=self.request.adapter,
            slot=self._slot(0),
        )

    def _slot(self, row: int) -> int | None:
        return self.slots[row] if self.slots else None

    def has_read(self, part: SequencePart, scores: TargetScores | None, pool: PagePool) -> None:
        """Notes that a part of the prompt is computed."""
        size = self.page_size
        self._computed += len(part.tokens)
        for place in range(part.start // size, self._computed // size):
            pool.fill(self._pages[place])
        if scores is not None:
            tops = zip(scores.top_tokens.tolist(), scores.top_logprobs.tolist(), strict=True)
            self._prompt_scores += [
                TokenScore(token, logprob, tuple(zip(*top, strict=True)))
                for token, logprob, top in zip(
                    part.targets, scores.logprobs.tolist(), tops, strict=True
                )
            ]

    def follows(self, other: Job, pool: PagePool) -> bool:
        """True if it waits only for results of another job, without an encoder: the logits after a
        prompt, and pages that it can copy."""
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
        self._state_copies += zip(other.slots[:1], self.slots[:1], strict=True)
        self._computed = self.cached = len(self.prompt)

    def _differing(self, other: Job) -> list[tuple[int, int]]:
        count = -(-len(self.prompt) // self.page_size)
        pages = zip(other._pages[:count], self._pages[:count], strict=True)
        return [(its, own) for its, own in pages if its != own]

    def decoded(
        self, tokens: tuple[int, ...], position: int, pages: tuple[int, ...], row: int = 0
    ) -> SequencePart:
        """The part of a new token and the drafts after it."""
        return SequencePart(
            tokens, position, pages, True, True, encoded=self.encoded, long=self.long,
            adapter=self.request.adapter, slot=self._slot(row),
        )  # fmt: skip

    @abstractmethod
    def parts(self) -> list[SequencePart]:
        """New tokens to compute, a part each; the prompt is computed."""

    def copies(self) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """Pages, and states, that are copied before these parts; asked once."""
        copies = self._copies, self._state_copies
        self._copies, self._state_copies = [], []
        return copies

    @abstractmethod
    def take(self, logits_RV: Tensor, drafts: Sequence[int] = ()) -> Iterator[Update]:
        """Takes the logits after the prompt, or after each token of its parts; yields an update for
        each token that is new. Any error makes the request fail."""

    def update(self, **fields: Any) -> Update:
        """An update, which the first time has the scores of the prompt."""
        if self._told:
            return Update(self.number, **fields)
        self._told = True
        return Update(
            self.number, prompt_scores=tuple(self._prompt_scores), cached=self.cached, **fields
        )


class TextJob(Job):
    """A request for one text, drawn token by token, which ``constraint`` must allow. Up to
    ``drafts`` tokens are computed in advance: what is drawn after the last token that was certain
    is the next one, and if it is the first draft, the logits after that are those of the token
    after it. So each token is drawn as without drafts, from the same logits."""

    def __init__(
        self,
        request: GenerationRequest,
        runner: Runner,
        tokenizer: Tokenizer,
        constraint: TokenConstraint | None = None,
        drafts: int = 0,
    ) -> None:
        super().__init__(request, runner)
        self._constraint, self._drafts, self._right = constraint, drafts, 0
        self._lookup = PromptLookup(request.prompt) if drafts and not runner.drafts else None
        self._sampler = TokenSampler(request.sampling, self.prompt, tokenizer)
        self._watch = StopWatch(request.stopping, tokenizer, self.text_before)
        self._new: list[int] = []
        self._table: tuple[int, ...] = ()

    def parts(self) -> list[SequencePart]:
        length = len(self.prompt) + len(self._new)
        room = self._room(length)
        drafts = () if self._lookup is None else self._lookup.draft(room)
        by_runner = room if self._lookup is None else 0
        count = (length + len(drafts) + by_runner - 1) // self.page_size + 1
        if len(self._table) != count:
            self._table = tuple(self._pages[:count])
        part = self.decoded((self._new[-1], *drafts), length - 1, self._table)
        if by_runner:
            before = tuple(self._new[-1 - self._right : -1])
            part = replace(part, drafts=by_runner, before=before)
        return [part]

    def _room(self, length: int) -> int:
        """The most drafts after a sequence of this length: after each of them comes a token."""
        room = min(self._drafts, self.request.stopping.max_new_tokens - len(self._new) - 1)
        if self._long_after is not None and not self.long:
            room = min(room, self._long_after - length)
        return room

    def take(self, logits_RV: Tensor, drafts: Sequence[int] = ()) -> Iterator[Update]:
        drawn = enumerate(zip(logits_RV, (*drafts, None), strict=True))
        for self._right, (logits_V, draft) in drawn:
            update = self._continued(logits_V)
            yield update
            if update.finish is not None or update.tokens[0] != draft or self.reading:
                return

    def _continued(self, logits_V: Tensor) -> Update:
        token, finish = self._chosen(logits_V)
        self._new.append(token)
        if self._lookup is not None:
            self._lookup.add(token)
        if not self.long and self.is_long(len(self.prompt) + len(self._new)):
            self.read_again((*self.prompt, *self._new))
            self._table = ()
        return self.update(tokens=(token,), scores=self._scores(logits_V, token), finish=finish)

    def _scores(self, logits_V: Tensor, token: int) -> tuple[TokenScore, ...]:
        top = self.request.logprobs
        return () if top is None else (token_score(logits_V, token, top),)

    def _chosen(self, logits_V: Tensor) -> tuple[int, Finish | None]:
        """The next token, and why the text ends with it."""
        if self._constraint is None:
            token = self._sampler.choose(logits_V)
            return token, self._watch.add(token)
        token = self._sampler.choose(logits_V, self._constraint.allowed())
        self._constraint.advance(token)
        finish = self._watch.add(token)
        return token, "stop" if self._constraint.finished else finish


class BeamJob(Job):
    """A request for the best texts. Each of its beams has a part in every step, and shares the
    pages of common text with others."""

    def __init__(self, request: GenerationRequest, runner: Runner, tokenizer: Tokenizer) -> None:
        super().__init__(request, runner)
        assert request.beams is not None
        self.rows = request.beams.width
        self._search = BeamSearch(
            request.beams, request.stopping, tokenizer, self.text_before, request.logprobs
        )
        self._tables: list[list[int]] = []
        self._rows: list[int] = []
        self._spare: list[int] = []
        self._last: list[int] = []
        self._length = len(self.prompt)

    @property
    def pages_needed(self) -> int:
        # Full pages of the prompt are common to all beams, and in the worst case nothing else is.
        common = len(self.prompt) // self.page_size
        return common + self.rows * (super().pages_needed - common)

    def parts(self) -> list[SequencePart]:
        return [
            self.decoded((token,), self._length - 1, tuple(table), row)
            for token, table, row in zip(self._last, self._tables, self._rows, strict=True)
        ]

    def take(self, logits_RV: Tensor, drafts: Sequence[int] = ()) -> Iterator[Update]:
        going = self._search.step(logits_RV)
        if not self._search.done:
            self._last = [token for _, token in going]
            self._fork([row for row, _ in going])
            return
        beams, stopping = self._search.results(), self.request.stopping
        stopped = all(
            len(beam.tokens) < stopping.max_new_tokens or beam.tokens[-1] in stopping.tokens
            for beam in beams
        )
        yield self.update(
            tokens=beams[0].tokens,
            scores=beams[0].scores,
            finish="stop" if stopped else "length",
            beams=beams,
        )

    def _fork(self, parents: Sequence[int]) -> None:
        """Makes beams that each continue one by a token, and gives them pages and slots."""
        size, length = self.page_size, self._length
        if not self._tables:
            count = -(-length // size)
            self._tables, self._spare = [self._pages[:count]], self._pages[count:]
            self._rows = [0]
        self._fork_states([self._rows[parent] for parent in parents])
        used = {page for table in self._tables for page in table}
        self._tables = [list(self._tables[parent]) for parent in parents]
        self._spare += used.difference(*self._tables)
        seen = set[int]()
        for table in self._tables:
            if length % size and table[-1] in seen:
                # A page that is not yet full belongs to a single beam.
                self._copies.append((table[-1], self._spare.pop()))
                table[-1] = self._copies[-1][1]
            seen.add(table[-1])
        self._length += 1
        for table in self._tables:
            if len(table) * size < self._length:
                table.append(self._spare.pop())

    def _fork_states(self, rows: Sequence[int]) -> None:
        """Leave each of these slots, by its place, to the first beam that continues it, and copy it
        for the others."""
        spare = sorted(set(range(self.rows)).difference(rows))
        self._rows = []
        for row in rows:
            taken = row in self._rows
            self._rows.append(spare.pop() if taken else row)
            if taken and self.slots:
                self._state_copies.append((self.slots[row], self.slots[self._rows[-1]]))
