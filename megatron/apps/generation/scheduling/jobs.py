"""Running requests: which tokens each one computes next, and which updates it sends."""

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
    """A request with its pages and the progress of its prompt.

    Attributes:
        number: assigned by the engine.
        source: client and HTTP request, among which the queue is fair.
        prompt: tokens with which the decoder begins.
        text_before: tokens that the new text continues.
        rows: number of sequences that the job decodes, each a part of a step.
        long: see `SequencePart.long`.
        encoded: number of the encoded prompt, for a model with an encoder.
        cached: number of prompt tokens that were already cached.
        slots: for a model with recurrent states, a slot for each of ``rows``. The prompt uses the
            first.
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
        """Maximum number of positions to compute. The last new token is never computed."""
        return len(self.prompt) + max(self.request.stopping.max_new_tokens - 1, 0)

    @property
    def pages_needed(self) -> int:
        """Maximum number of pages that the request can need."""
        return -(-self._positions // self.page_size) + self._pages_again

    @property
    def _pages_again(self) -> int:
        """Number of additional pages that replace the prompt's full pages if the sequence becomes
        long and is recomputed, because other requests may read the original ones."""
        again = self.is_long(self._positions) and not self.long
        return len(self.prompt) // self.page_size if again else 0

    def is_long(self, length: int) -> bool:
        """Return whether a sequence of this length exceeds `Runner.long_after`."""
        return self._long_after is not None and length > self._long_after

    def admit(self, pool: PagePool) -> bool:
        """Reserve all pages and slots that the job can ever need, sharing the pages of a cached
        prompt. Return False, reserving nothing, if they are not available yet."""
        if self._digests is None and not pool.shares:
            self._digests = []
        if self._digests is None:
            self._digests = prefix_digests(
                self.prompt, self.page_size, self.long, self.request.adapter
            )
        digests, shared = self._digests, list[int]()
        if self.request.prompt_logprobs is None:
            # The last token is always computed, for the logits after it.
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
        """Return all pages and slots to the pool."""
        pool.release(self._pages, self.number)
        pool.release_slots(self.slots)
        self._pages, self.slots = [], []

    @property
    def reading(self) -> bool:
        """True if part of the prompt is not computed yet."""
        return self._computed < len(self._read_tokens)

    def read_again(self, tokens: tuple[int, ...]) -> None:
        """Restart a sequence from its first token as a long one, whose rotary frequencies, and thus
        all keys, are different."""
        # Other requests may share the prompt's pages, so use the additional ones instead.
        pages, count = self._pages, self._pages_again
        if count:
            self._pages = pages[-count:] + pages[count:-count] + pages[:count]
        self.long, self._computed, self._read_tokens = True, 0, tokens
        # Drop pending copies, which refer to the pages of the short sequence.
        self._copies, self._state_copies = [], []

    def read(self, pool: PagePool, budget: int) -> SequencePart | None:
        """Return the next part of the prompt, with up to ``budget`` tokens or one `Runner.piece` if
        that is longer. Return None while another job computes the same tokens."""
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
            # Do not overwrite a page that another job has filled in the meantime.
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
        """Record that a part of the prompt has been computed."""
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
        """Return whether this job can copy its prompt from ``other``: both have the same prompt and
        adapter, this one needs only the logits after it, and its own differing pages are not
        published. Not for models with an encoder."""
        return (
            self.request.prompt_logprobs is None
            and self.request.adapter == other.request.adapter
            and self._read_tokens == other._read_tokens == self.prompt
            and min(each.request.stopping.max_new_tokens for each in (self, other)) > 0
            and all(pool.is_private(page) for _, page in self._differing(other))
        )

    def adopt(self, other: Job) -> None:
        """Take over the prompt that ``other`` has computed. Its pages and state are copied before
        the next parts."""
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
        """Return the part for a new token and the drafts after it."""
        return SequencePart(
            tokens, position, pages, True, True, encoded=self.encoded, long=self.long,
            adapter=self.request.adapter, slot=self._slot(row),
        )  # fmt: skip

    @abstractmethod
    def parts(self) -> list[SequencePart]:
        """Return the new tokens to compute, one part for each row. The prompt is already
        computed."""

    def copies(self) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """Return the page and state copies to make before the next parts, and clear them."""
        copies = self._copies, self._state_copies
        self._copies, self._state_copies = [], []
        return copies

    @abstractmethod
    def take(self, logits_RV: Tensor, drafts: Sequence[int] = ()) -> Iterator[Update]:
        """Process the logits after the prompt, or after each token of the last parts, and yield an
        update for each new token. Any error makes the request fail."""

    def update(self, **fields: Any) -> Update:
        """Return an update. The first one also includes the scores of the prompt."""
        if self._told:
            return Update(self.number, **fields)
        self._told = True
        return Update(
            self.number, prompt_scores=tuple(self._prompt_scores), cached=self.cached, **fields
        )


class TextJob(Job):
    """Request for one text, sampled token by token within an optional ``constraint``. Up to
    ``drafts`` tokens are computed in advance. The next token is sampled from the logits after the
    last sampled one. If it equals the first draft, the logits after this draft give the token after
    it, and so on. So each token is sampled from the same logits as without drafts."""

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
        """Return the maximum number of drafts at this sequence length. One more token is always
        sampled after the drafts."""
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
        """Return the next token, and the reason if it ends the text."""
        if self._constraint is None:
            token = self._sampler.choose(logits_V)
            return token, self._watch.add(token)
        token = self._sampler.choose(logits_V, self._constraint.allowed())
        self._constraint.advance(token)
        finish = self._watch.add(token)
        return token, "stop" if self._constraint.finished else finish


class BeamJob(Job):
    """Beam search request. Each beam has a part in every step. Beams share the full pages of their
    common prefix."""

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
        # All beams share the prompt's full pages. In the worst case nothing else is shared.
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
        """Replace the beams by continuations of the beams in the rows ``parents``, and assign pages
        and slots to the new beams."""
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
                # Beams must not share a page that is not full yet.
                self._copies.append((table[-1], self._spare.pop()))
                table[-1] = self._copies[-1][1]
            seen.add(table[-1])
        self._length += 1
        for table in self._tables:
            if len(table) * size < self._length:
                table.append(self._spare.pop())

    def _fork_states(self, rows: Sequence[int]) -> None:
        """Keep each row's slot for the first beam that continues it, and copy it for others."""
        spare = sorted(set(range(self.rows)).difference(rows))
        self._rows = []
        for row in rows:
            taken = row in self._rows
            self._rows.append(spare.pop() if taken else row)
            if taken and self.slots:
                self._state_copies.append((self.slots[row], self.slots[self._rows[-1]]))
