"""Attention of generated tokens to pages, with the tokens next to them and without."""

import numpy as np
import pytest
import torch

from megatron.apps.generation.decoding.sampling import softened
from megatron.apps.generation.execution import page_reading
from megatron.apps.generation.execution.page_reading import PageReading, ReadShape, StoredPages
from megatron.model.attention_masks import AttentionScoring

P, K, D, PAGES = 16, 2, 8, 40
# Texts that share a prompt's page, pages with others between them, several tokens of one text.
TABLES = [(0, 1, 2), (0, 3, 6), (0, 4, 9), (20, 21, 22), (20, 21, 22), (20, 21, 22), (31,)]
POSITIONS = [40, 47, 32, 33, 34, 35, 5]


def stored(dtype):
    random = torch.Generator().manual_seed(0)
    return StoredPages(*(torch.randn(PAGES, K, P, D, generator=random).to(dtype) for _ in range(2)))


def attended(q_BKGD, pages, rows, window, bias_NT, sinks_N):
    shape = ReadShape.of(q_BKGD[rows], pages)
    positions, tables = ([each[row] for row in rows] for each in (POSITIONS, TABLES))
    reading = PageReading.of(positions, tables, window, shape, torch.device("cpu"))
    scores = AttentionScoring(causal=True, window=window)
    return reading.attend(q_BKGD[rows], pages, scores, bias_NT, sinks_N)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 18])
@pytest.mark.parametrize("more", [False, True])
def test_tokens_next_to_others(group, dtype, window, more):
    """The bits of each alone, and the softmax over all that it sees, in float64."""
    random = torch.Generator().manual_seed(1)
    q_BKGD = torch.randn(len(TABLES), K, group, D, generator=random).to(dtype)
    pages, bias_NT, sinks_N = stored(dtype), None, None
    if more:
        bias_NT = torch.randn(K * group, 64, generator=random)
        sinks_N = torch.randn(K * group, generator=random)
    together = attended(q_BKGD, pages, list(range(len(TABLES))), window, bias_NT, sinks_N)
    for row, (table, position) in enumerate(zip(TABLES, POSITIONS, strict=True)):
        (alone_KGD,) = attended(q_BKGD, pages, [row], window, bias_NT, sinks_N)
        assert torch.equal(together[row], alone_KGD)
        first = 0 if window is None else max(0, position - 17)
        keys, values = (
            each[list(table)].transpose(0, 1).flatten(1, 2)[:, first : position + 1].double()
            for each in pages[:2]
        )
        scores_KGL = q_BKGD[row].double() @ keys.transpose(1, 2) / D**0.5
        if more:
            distances = torch.arange(position - first, -1, -1)
            scores_KGL += bias_NT[:, distances].view(K, group, -1)
            sinks_KG1 = sinks_N.double().view(K, group, 1)
            scores_KGL = torch.cat([scores_KGL, sinks_KG1], -1)
        weights_KGL = scores_KGL.softmax(-1)[..., : keys.shape[1]]
        expected = (weights_KGL @ values).to(dtype)
        tolerance = 2e-6 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(alone_KGD, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sums_next_to_others(threads):
    """The sums of a text over its pages have the same bits with more texts and zeros behind it, on
    several threads too."""
    random = torch.Generator().manual_seed(2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for count in (1, 3, 63):
            x_BCKGE = torch.zeros(6, 64, 2, 4, 65)
            x_BCKGE[:, :count] = torch.randn(6, count, 2, 4, 65, generator=random)
            together = page_reading._sum_of_pages(x_BCKGE)
            for pages in {count, 64}:
                assert torch.equal(page_reading._sum_of_pages(x_BCKGE[:1, :pages]), together[:1])
    finally:
        torch.set_num_threads(before)


def test_logits_next_to_others():
    """Log-probabilities of rows have the bits of each row alone, and are those of torch."""
    random = torch.Generator().manual_seed(0)
    logits_RV = 8 * torch.randn(9, 1003, generator=random)
    together = list(softened(logits_RV.numpy(), 0.7))
    tokens = torch.randint(1003, (9,), generator=random)
    expected = (logits_RV.double() / 0.7).log_softmax(-1)
    for row, token in enumerate(tokens.tolist()):
        (alone,) = softened(logits_RV[row : row + 1].numpy(), 0.7)
        assert np.array_equal(together[row].weights_V, alone.weights_V)
        assert together[row].log_prob(token) == alone.log_prob(token)
        assert abs(alone.log_prob(token) - expected[row, token]) < 4e-6  # of float32
