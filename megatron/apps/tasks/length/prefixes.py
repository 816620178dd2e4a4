"""Log-probabilities of many short continuations of one long prompt, which is computed once."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.writing import TextWriter
from megatron.apps.tasks.harness.scoring import Likelihood

_CHOSEN = 1e9
"""Added to a token's logit so that it is the next one; scores are of the logits without it."""


def prefix_likelihoods(
    writer: TextWriter, prompt: Sequence[int], continuations: Sequence[Sequence[int]]
) -> list[Likelihood]:
    """The likelihood of each continuation, token ids. Each token of the tree of continuations is
    one request of the generation engine, whose cache has the pages of the prompt. Every rank must
    call it."""
    edges: dict[tuple[tuple[int, ...], int], int] = {}
    for continuation in continuations:
        for at, token in enumerate(continuation):
            edges.setdefault((tuple(continuation[:at]), token), len(edges))
    requests = [
        GenerationRequest(
            (*prompt, *before),
            StopRules(1),
            Sampling(greedy=True, bias={token: _CHOSEN}),
            logprobs=1,
        )
        for before, token in edges
    ]
    scores = []
    for completion in writer.completions(requests):
        (score,) = completion.scores
        scores.append((score.logprob, score.top[0][0] == score.token))
    result = []
    for continuation in continuations:
        of_tokens = [
            scores[edges[tuple(continuation[:at]), token]] for at, token in enumerate(continuation)
        ]
        total = sum(log_prob for log_prob, _ in of_tokens)
        result.append(Likelihood(total, all(best for _, best in of_tokens)))
    return result
