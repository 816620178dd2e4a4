"""A text that is drawn token by token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron.inference.job import Job
from megatron.inference.request import Finish, GenerationRequest, TokenScore, Update
from megatron.inference.scores import scores_of_tokens
from megatron.inference.step import Part, Runner


class TextJob(Job):
    """A request for one text."""

    def __init__(self, number: int, request: GenerationRequest, runner: Runner) -> None:
        super().__init__(number, request, runner)
        self.new: list[int] = []
        self._table: tuple[int, ...] = ()

    def parts(self) -> list[Part]:
        position = len(self.prompt) + len(self.new) - 1
        count = position // self.page_size + 1
        if len(self._table) != count:
            self._table = tuple(self._pages[:count])
        return [Part((self.new[-1],), position, self._table, True, True, encoded=self.encoded)]

    def append(self, token: int, score: TokenScore | None) -> Update:
        """Adds a token that was chosen. Raises whatever makes the request fail."""
        self.new.append(token)
        scores = () if score is None else (score,)
        return self.update(tokens=(token,), scores=scores, finish=self._finish(token))

    def _finish(self, token: int) -> Finish | None:
        stopping = self.request.stopping
        if token in stopping.tokens:
            return "stop"
        return "length" if len(self.new) == stopping.max_new_tokens else None


def append_tokens(jobs: Sequence[TextJob], logits_RV: Tensor) -> list[Update]:
    """Chooses the next token of each job from its row, and says what is new."""
    tokens = logits_RV.argmax(-1).tolist()
    wanted = [row for row, job in enumerate(jobs) if job.request.logprobs is not None]
    scores = scores_of_tokens(
        logits_RV[wanted], [tokens[row] for row in wanted], [jobs[row].request.logprobs or 0 for row in wanted]
    )
    by_row = dict(zip(wanted, scores, strict=True))
    return [
        job.append(token, by_row.get(row))
        for row, (job, token) in enumerate(zip(jobs, tokens, strict=True))
    ]
