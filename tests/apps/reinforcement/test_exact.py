"""Probabilities of training against those that tokens were drawn from, bit for bit, and their
gradients against the ordinary pass."""

import dataclasses

import numpy as np
import pytest
import torch
from small_gpts import KINDS

from megatron.apps.reinforcement.batches import rows_of
from megatron.apps.reinforcement.episodes import Episode, Prompt
from megatron.apps.reinforcement.exact import cache as exact_cache
from megatron.apps.reinforcement.exact.layout import laid_out, segments

from .exact_models import Model, drawn

LENGTHS = (5, 70, 64)
SAMPLE = {("gpt2", "fp32", False), ("gemma2", "fp32", True), ("llama", "bf16", True)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def cells():
    for kind in KINDS:
        if kind == "longrope":
            continue
        for dtype in DTYPES:
            for talks in (False, True):
                marks = () if (kind, dtype, talks) in SAMPLE else (pytest.mark.proof,)
                yield pytest.param(kind, dtype, talks, marks=marks)


@pytest.mark.parametrize(("kind", "dtype", "talks"), list(cells()))
def test_bits_of_drawing(kind, dtype, talks):
    """In one batch, in batches of one text, and whatever the texts next to them."""
    model = Model(kind, DTYPES[dtype])
    episodes = model.write(LENGTHS, 90, talks)
    assert any(each.turns for each in episodes) == talks
    log_probs_BP, grads = model.trained(model.laid_out(episodes))
    expected_BP = drawn(episodes)
    assert torch.equal(log_probs_BP.float(), expected_BP)
    for place in (0, 3):
        one_1P, _ = model.trained(model.laid_out([episodes[place]]))
        assert torch.equal(one_1P[0], expected_BP[place, : one_1P.shape[1]])
    ordinary_BP, ordinary = model.trained(rows_of(episodes))
    assert not torch.equal(ordinary_BP, expected_BP)  # or else nothing is compared
    if dtype == "fp32":
        torch.testing.assert_close(ordinary_BP, expected_BP, rtol=0, atol=2e-5)
        for name, grad in ordinary.items():
            torch.testing.assert_close(
                grads[name], grad, rtol=0, atol=2e-5 * float(grad.abs().max())
            )


def threaded():
    for dtype in DTYPES:
        for heads, count in ((3, 4), (6, 2)):
            for threads in (2, 3, 4, 8):
                marks = () if (dtype, threads) == ("fp32", 2) else (pytest.mark.proof,)
                yield pytest.param(dtype, heads, count, threads, marks=marks)


@pytest.mark.parametrize(("dtype", "heads", "count", "threads"), list(threaded()))
def test_bits_of_drawing_on_several_threads(dtype, heads, count, threads):
    """Two threads that divide a matrix of 5 to 7 or 9 to 11 rows change the bits of some. Such are
    the matrices of 3 tokens that share a page, and of a token that reads one alone."""
    sizes = {"num_attention_heads": heads, "num_query_groups": 1, "hidden_size": 16 * heads}
    model = Model("llama", DTYPES[dtype], **sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        episodes = model.write(LENGTHS, count)
        for texts in (episodes, episodes[:1]):
            log_probs_BP, _ = model.trained(model.laid_out(texts))
            assert torch.equal(log_probs_BP.float(), drawn(texts))
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["gemma2", "gpt-oss"])
def test_gradients_in_float64(kind):
    """Texts that share prompts and texts with answers of an environment, against the ordinary pass
    of padded rows."""
    model = Model(kind, torch.float64)
    draw = np.random.default_rng(1)
    prompts = [draw.integers(3, 120, size) for size in LENGTHS]
    owns = [draw.random(size) < 0.8 for size in (9, 70, 20, 1, 66, 30)]
    episodes = [
        dataclasses.replace(
            text(prompts[n // 2], draw.integers(3, 120, len(own))), own_L=own | (own.sum() == 0)
        )
        for n, own in enumerate(owns)
    ]
    rows = rows_of(episodes)
    batch = laid_out(episodes, rows, int, model.generation.max_positions)
    ones_BP, grads = model.trained(batch)
    others_BP, ordinary = model.trained(rows)
    torch.testing.assert_close(ones_BP, others_BP, rtol=0, atol=4e-6)  # rounded to float32
    for name, grad in ordinary.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-12 * float(grad.abs().max()))


def test_other_kernel_is_seen(monkeypatch):
    model = Model("llama", torch.float32)
    episodes = model.write(LENGTHS, 40)
    batch = model.laid_out(episodes)
    assert torch.equal(model.trained(batch)[0], drawn(episodes))
    paged = exact_cache.EpisodeCache.paged

    def off(self, layer, *args):
        y = paged(self, layer, *args)
        return y * (1 + 2**-23) if layer == 1 else y

    monkeypatch.setattr(exact_cache.EpisodeCache, "paged", off)
    difference = (model.trained(batch)[0] - drawn(episodes)).abs()
    assert 0 < difference.max() < 1e-4


def text(prompt, tokens, own=None):
    count = len(tokens)
    own_L = np.ones(count, bool) if own is None else np.array(own, bool)
    return Episode(
        Prompt(0, np.array(prompt), ""), np.array(tokens), own_L, np.zeros(count, np.float32), "",
        True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("", []),
        ("1", []),
        ("111", [(0, 2, True)]),
        ("1100", [(0, 1, True)]),
        ("110011", [(0, 1, True), (1, 4, False), (4, 5, True)]),
        ("10101", [(0, 2, False), (2, 4, False)]),
        ("0011", [(0, 2, False), (2, 3, True)]),
        ("000", []),
    ],
)
def test_segments(own, expected):
    episode = text([7], range(len(own)), [each == "1" for each in own])
    assert list(segments(episode)) == expected


def test_layout():
    """Every place of every text is a token of the row, at its position, in its page; texts of one
    prompt have it once."""
    size = 4
    episodes = [
        text(range(10, 16), [30, 31, 32]),
        text(range(10, 16), [40, 41, 42, 43, 44], [1, 1, 0, 0, 1]),
        text(range(50, 58), [60]),
        text(range(10, 16), [33, 34]),
    ]
    rows = rows_of(episodes)
    batch = laid_out(episodes, rows, lambda count: count + 3, 100, size)
    layout, row_T = batch.layout, batch.tokens_1T[0]
    assert len(row_T) == 6 + 2 + 4 + 8 + 1 + 3
    places = dict(zip(layout.places_W.tolist(), layout.rows_W.tolist(), strict=True))
    assert len(places) == len(layout.places_W)
    for number, episode in enumerate(episodes):
        read = [*episode.prompt.tokens, *episode.tokens_L[: np.flatnonzero(episode.own_L)[-1]]]
        assert row_T[layout.rows_BS[number, : len(read)]].tolist() == read
        targets = row_T[batch.targets_BP[number]].tolist()
        expected = [read[at] for at in rows.positions_BP[number] if rows.loss_mask_BS[number, at]]
        assert targets[: len(expected)] == expected
    owners = layout.rows_BS[layout.first_BS].tolist()
    assert sorted(owners) == list(range(6 + 2 + 4 + 8 + 1))
    for part in layout.parts:
        for position in range(part.start + len(part.tokens)):
            place = part.pages[position // size] * size + position % size
            assert place in places  # all that the part reads is written
