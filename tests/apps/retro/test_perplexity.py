"""Perplexity by chunks, and the overlap of chunks with their neighbours, against definitions."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_databases import CHUNK, EOD, chunk_database, nearest

from megatron.apps.retro.evaluation import check_kept, token_lengths
from megatron.apps.retro.perplexity import (
    EvaluatedText,
    between,
    filtered,
    longest_common,
    measure_chunks,
    overlaps,
    scores_by_dataset,
    scores_of,
)
from megatron.config import ConfigError
from megatron.data.gpt_batch import GPTCollator
from megatron.data.samples import Piece
from megatron.families import spec_of
from megatron.features.evaluation.evaluator import build_evaluator
from megatron.features.retro.family import Retrieved
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.mesh import Mesh

S, L, SAMPLES = 3 * CHUNK, 3, 7
RETRO = {
    "family": "retro",
    "num_layers": 3,
    "retro_add_retriever": True,
    "retro_cross_attention_layers": (2, 3),
    "retro_gpt_chunk_length": CHUNK,
    "seq_length": S,
}


class Samples(list):
    """Of two datasets."""

    def origin(self, sample):
        return [Piece("ab"[sample % 2], sample, 0, S + 1)]


def text_of(kept=5):
    random = np.random.default_rng(5)
    samples = Samples(random.integers(0, EOD, (SAMPLES + 2, S + 1)))
    chunks_NM = np.concatenate([tokens[:S].reshape(-1, CHUNK) for tokens in samples[:SAMPLES]])
    numbers_ILQ = nearest(chunks_NM, kept).reshape(SAMPLES, L, kept)
    return EvaluatedText(samples, numbers_ILQ, chunk_database())


@torch.inference_mode()
def log_probs_of(model, tokens, neighbors_LKR):
    """Of the tokens 1 to S of a sample."""
    batch = Retrieved(torch.from_numpy(neighbors_LKR)[None])
    begin = LayerState(torch.from_numpy(tokens[None, :S]), masks=AttentionMasks(), batch=batch)
    log_probs = model(begin).hidden[0, :, :61].log_softmax(-1)
    return log_probs.gather(1, torch.from_numpy(tokens[1:, None]))[:, 0].numpy()


def by_chunk(values_S):
    """Sums over the tokens of each chunk, the first of which is not predicted."""
    return [values_S[: CHUNK - 1].sum()] + [
        values_S[start : start + CHUNK].sum() for start in range(CHUNK - 1, S, CHUNK)
    ]


@pytest.fixture(scope="module")
def measured(gpt_config, random_gpt):
    """Measures a text with a random Retro, which is the second value."""
    config = gpt_config(**RETRO)
    model = random_gpt(config)
    engine = build_evaluator(config, spec_of(config.model), Mesh(), torch.device("cpu"))
    values = dict(model.canonical_parameters())
    with torch.no_grad():
        for param, name in engine.names.items():
            param.copy_(values[name])
    collate = GPTCollator(None, False, False, False)

    def measure(text, kind):
        return measure_chunks(engine, collate, text, kind, 3, seed=2)

    return measure, model


@pytest.mark.parametrize("kind", ["own", "none", "shuffled"])
def test_log_probabilities_of_chunks(kind, measured):
    measure, model = measured
    text = text_of()
    found_IP = measure(text, kind)
    read = text.shuffled(2) if kind == "shuffled" else text
    assert found_IP.shape == (SAMPLES, L + 1)
    for sample in range(SAMPLES):
        neighbors_LKR = read.database.tokens(read.numbers_ILQ[sample, :, :2], 2)
        if kind == "none":
            neighbors_LKR = neighbors_LKR[:, :0]
        values_S = log_probs_of(model, text.tokens(sample), neighbors_LKR)
        np.testing.assert_allclose(found_IP[sample], by_chunk(values_S), atol=1e-4)


def test_the_kinds_of_neighbours_differ(measured):
    """In all chunks but the first, whose last token is the first to read neighbours."""
    measure, _ = measured
    found = {kind: measure(text_of(), kind) for kind in ("own", "none", "shuffled")}
    for kind in ("none", "shuffled"):
        differences_IP = np.abs(found[kind] - found["own"])
        assert differences_IP[:, 0].max() < 1e-5
        assert np.median(differences_IP[:, 1:]) > 1e-3


def test_shuffled_neighbours_are_those_of_another_chunk():
    text = text_of()
    rows_NQ = np.arange(SAMPLES * L)[:, None] + np.zeros(3, int)
    numbered = EvaluatedText(text.samples, rows_NQ.reshape(SAMPLES, L, 3), text.database)
    shuffled_NQ = numbered.shuffled(1).numbers_ILQ.reshape(-1, 3)
    assert sorted(shuffled_NQ[:, 0].tolist()) == list(range(SAMPLES * L))
    assert not (shuffled_NQ == rows_NQ).any()


def longest_in_both(chunk, other):
    """By trying all substrings."""
    found = 0
    for start in range(len(chunk)):
        for end in range(start + found + 1, len(chunk) + 1):
            part = chunk[start:end]
            places = range(len(other) - len(part) + 1)
            if EOD in part or not any(other[at : at + len(part)] == part for at in places):
                break
            found = end - start
    return found


def test_longest_common_run():
    random = np.random.default_rng(2)
    chunks_NM = random.choice([1, 2, 3, EOD], (40, 8), p=[0.4, 0.3, 0.2, 0.1])
    neighbors_NKR = random.choice([1, 2, 3, EOD], (40, 3, 11), p=[0.4, 0.3, 0.2, 0.1])
    neighbors_NKR[:5, 1, 2:10] = chunks_NM[:5]
    expected = [
        max(longest_in_both(chunk, other) for other in others)
        for chunk, others in zip(chunks_NM.tolist(), neighbors_NKR.tolist(), strict=True)
    ]
    assert longest_common(chunks_NM, neighbors_NKR, EOD).tolist() == expected
    assert len(set(expected)) > 4
    assert longest_common(chunks_NM, neighbors_NKR[:, :0], EOD).tolist() == [0] * 40


def test_overlaps_are_those_of_whole_chunks():
    """The last token of a sample is in none, and -1 is no neighbour."""
    text = text_of()
    start = text.database.tokens(1)
    text.samples[1][CHUNK : 2 * CHUNK] = start
    text.numbers_ILQ[1, 1] = [-1, 1, -1, -1, -1]
    text.numbers_ILQ[1, 2] = -1
    found_IP = overlaps(text, 2, 2)
    assert np.isnan(found_IP[:, L]).all()
    assert found_IP[1, 1] == 1.0
    assert found_IP[1, 2] == 0.0
    assert overlaps(text, 1, 2)[1, 1] == 0.0


def test_filtered_scores():
    """Bits per byte of the chunks with at most a share, from their sums."""
    text = text_of()
    bytes_V = np.arange(61) % 4
    log_prob_IP = -np.random.default_rng(1).random((SAMPLES, L + 1))
    scores = scores_of(text, log_prob_IP, bytes_V)
    assert scores.tokens_N.reshape(SAMPLES, -1).tolist() == [[3, 4, 4, 1]] * SAMPLES
    tokens = np.stack([text.tokens(n) for n in range(SAMPLES)])
    assert scores.bytes_N.sum() == bytes_V[tokens[:, 1:]].sum()
    assert scores.bytes_N[1] == bytes_V[tokens[0, CHUNK : 2 * CHUNK]].sum()
    assert scores.loss == pytest.approx(-log_prob_IP.sum() / (SAMPLES * S))
    overlap_IP = np.random.default_rng(4).integers(0, 5, log_prob_IP.shape) / 4
    overlap_IP[:, L] = np.nan
    shares = (0.0, 0.25, 1.0)
    few, all_of = filtered(overlap_IP.ravel(), shares), log_prob_IP[:, :L].sum()
    within = between(overlap_IP.ravel(), shares)
    assert few[-1].sum() == sum(mask.sum() for mask in within) == SAMPLES * L
    few, within = ([scores.part(mask) for mask in masks] for masks in (few, within))
    for place, share in enumerate(shares):
        chosen = overlap_IP <= share
        size = scores.bytes_N.reshape(SAMPLES, -1)[chosen].sum()
        bits = -log_prob_IP[chosen].sum() / math.log(2) / size
        assert few[place].bits_per_byte == pytest.approx(bits)
    last = (overlap_IP > 0.25) & (overlap_IP <= 1)
    mean = -log_prob_IP[last].sum() / scores.tokens_N.reshape(SAMPLES, -1)[last].sum()
    assert within[-1].perplexity == pytest.approx(math.exp(mean))
    assert few[-1].perplexity == pytest.approx(
        math.exp(-all_of / scores.tokens_N.reshape(SAMPLES, -1)[:, :L].sum())
    )


def test_datasets_of_a_blend():
    text, log_prob_IP = text_of(), -np.ones((SAMPLES, L + 1))
    log_prob_IP[1::2] *= 2
    found = scores_by_dataset(text, scores_of(text, log_prob_IP, np.ones(61, np.int64)))
    assert found["b"].loss == pytest.approx(2 * found["a"].loss)
    assert [int(found[name].tokens_N.sum()) for name in "ab"] == [4 * S, 3 * S]


def test_special_tokens_have_no_bytes():
    assert token_lengths([b"a", b"<eod>", b"", b"bcd"], frozenset({1})).tolist() == [1, 0, 0, 3]


def test_fewer_neighbours_than_the_model_reads_are_refused(gpt_config):
    model, project = gpt_config(**RETRO).model, SimpleNamespace(folder="project")
    check_kept(text_of(kept=2), model, project)
    with pytest.raises(ConfigError, match=r"project has 1 neighbours .* reads 2: .*-num-neighbors"):
        check_kept(text_of(kept=1), model, project)
