"""A beam search, whose beams share the pages of what they have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.apps.generation.decoding.beams import BeamSearch
from megatron.apps.generation.request import GenerationRequest, Update
from megatron.apps.generation.scheduling.job import Job
from megatron.apps.generation.step import Runner, SequencePart
from megatron.tokenizer import Tokenizer


class BeamJob(Job):
    """A request for the best texts. Each of its beams has a part in every step."""

    def __init__(self, request: GenerationRequest, runner: Runner, tokenizer: Tokenizer) -> None:
        super().__init__(request, runner)
        assert request.beams is not None
        self.rows = request.beams.width
        self._search = BeamSearch(
            request.beams, request.stopping, tokenizer, self.text_before, request.logprobs
        )
        self._tables: PageTables | None = None
        self._last: list[int] = []
        self._length = len(self.prompt)

    @property
    def pages_needed(self) -> int:
        # Full pages of the prompt are common to all beams, and in the worst case nothing else is.
        common = len(self.prompt) // self.page_size
        return common + self.rows * (super().pages_needed - common)

    def parts(self) -> list[SequencePart]:
        assert self._tables is not None
        return [
            self.decoded(token, self._length - 1, tuple(table))
            for token, table in zip(self._last, self._tables.tables, strict=True)
        ]

    def take(self, logits_RV: Tensor) -> Update | None:
        going = self._search.step(logits_RV)
        if not self._search.done:
            self._last = [token for _, token in going]
            self._fork([row for row, _ in going])
            return None
        beams = self._search.results()
        stopped = all(self._stopped(beam.tokens) for beam in beams)
        return self.update(
            tokens=beams[0].tokens,
            scores=beams[0].scores,
            finish="stop" if stopped else "length",
            beams=beams,
        )

    def _stopped(self, tokens: Sequence[int]) -> bool:
        stopping = self.request.stopping
        return len(tokens) < stopping.max_new_tokens or tokens[-1] in stopping.tokens

    def _fork(self, parents: Sequence[int]) -> None:
        if self._tables is None:
            self._tables = PageTables(self._pages, self._length, self.page_size)
        self._copies += self._tables.fork(parents, self._length)
        self._length += 1
        self._tables.extend(self._length)


class PageTables:
    """The pages of each beam, and those that none uses now."""

    def __init__(self, pages: Sequence[int], length: int, page_size: int) -> None:
        """One beam of ``length`` positions begins; ``pages`` are all that there will be."""
        self.page_size = page_size
        count = -(-length // page_size)
        self.tables = [list(pages[:count])]
        self._spare = list(pages[count:])

    def fork(self, parents: Sequence[int], length: int) -> list[tuple[int, int]]:
        """Makes beams that each continue one of ``length`` positions. A page that is not full yet
        belongs to one beam alone: returns (from, to) of those to copy."""
        used = {page for table in self.tables for page in table}
        self.tables = [list(self.tables[parent]) for parent in parents]
        self._spare += used.difference(*self.tables)
        if length % self.page_size == 0:
            return []
        copies, seen = [], set[int]()
        for table in self.tables:
            if table[-1] in seen:
                copies.append((table[-1], self._spare.pop()))
                table[-1] = copies[-1][1]
            seen.add(table[-1])
        return copies

    def extend(self, length: int) -> None:
        """Gives every beam the pages of ``length`` positions."""
        for table in self.tables:
            if len(table) * self.page_size < length:
                table.append(self._spare.pop())
