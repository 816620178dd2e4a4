"""Synthetic samples of BERT and T5: the usual ones, of documents that count."""

import numpy as np
import pytest

from megatron.config import ConfigError, TokenizerConfig
from megatron.features.masked import batch as mock
from megatron.features.masked.batch import MockTokenizer, mock_samples
from megatron.features.masked.bert import BertRecipe
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.t5 import T5Recipe
from megatron.tokenizer import build_tokenizer

LENGTH, SAMPLES = 32, 40


def tokenizer(size: int = 99) -> MockTokenizer:
    config = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=size)
    return MockTokenizer(build_tokenizer(config))


def samples(recipe: type[BertRecipe] | type[T5Recipe], part: int = 0, seed: int = 1) -> list:
    tokens = tokenizer()
    length = LENGTH if recipe is BertRecipe else (LENGTH, None)
    made = recipe.from_config(MaskedDataConfig(), tokens, length, seed)
    found = mock_samples(made, tokens, SAMPLES, part)
    return [found[i] for i in range(SAMPLES)]


def equal(one: list, other: list) -> bool:
    pairs = zip(one, other, strict=True)
    return all(np.array_equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("recipe", [BertRecipe, T5Recipe])
def test_samples_depend_on_seed_and_part_alone(recipe):
    assert equal(samples(recipe), samples(recipe))
    assert not equal(samples(recipe), samples(recipe, part=1))
    assert not equal(samples(recipe), samples(recipe, seed=2))


def test_a_bert_sample_counts_and_some_are_padded():
    tokens, found = tokenizer(), samples(BertRecipe)
    order = {int(i): place for place, i in enumerate(tokens.plain_ids)}
    for sample in found:
        used = int(sample.padding_mask_S.sum())
        text = np.where(sample.labels_S >= 0, sample.labels_S, sample.tokens_S)[:used]
        assert text[0] == tokens.cls and text[-1] == tokens.sep
        first, second = np.split(text[1:-1], np.flatnonzero(text[1:-1] == tokens.sep))
        parts = [[order[int(i)] for i in part] for part in (first, second[1:])]
        for part in parts:
            assert set(np.diff(part) % len(order)) <= {1}
        ahead = (parts[1][0] - parts[0][0]) % len(order) < len(order) // 2
        assert sample.is_random == (not ahead)
    padded = [int(sample.padding_mask_S.sum()) < LENGTH for sample in found]
    assert any(padded) and not all(padded)
    assert {sample.is_random for sample in found} == {0, 1}


def test_a_t5_sample_counts():
    tokens = tokenizer()
    order = {int(i): place for place, i in enumerate(tokens.plain_ids)}
    for sample in samples(T5Recipe):
        text: list[int] = []
        labels = sample.labels_D[sample.labels_D >= 0].tolist()
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in tokens.sentinels:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        for token in sample.encoder_tokens_E[: sample.encoder_padding_mask_E.sum() - 1].tolist():
            text += spans.get(token, [token])
        assert set(np.diff([order[token] for token in text]) % len(order)) == {1}


def test_a_vocabulary_keeps_its_own_special_tokens():
    null = tokenizer()
    assert null.eos == null.eod == 99  # NullTokenizer's end of a document, of 100 ids
    assert len({null.cls, null.sep, null.pad, null.mask, null.eos, *null.sentinels}) == 30
    assert not np.isin(null.plain_ids, [null.cls, null.eod, *null.sentinels]).any()


def test_a_tiny_vocabulary_has_too_few_sentinels():
    with pytest.raises(ConfigError, match="the vocabulary has 4 sentinels"):
        T5Recipe.from_config(MaskedDataConfig(), tokenizer(15), (512, None), 1)


def test_a_long_run_has_the_same_samples_again(monkeypatch):
    monkeypatch.setattr(mock, "SAMPLES", 8)
    tokens = tokenizer()
    recipe = BertRecipe.from_config(MaskedDataConfig(), tokens, LENGTH, 1)
    found = mock_samples(recipe, tokens, 10**12, 0)
    assert len(found) == 10**12
    first = [found[i] for i in range(8)]
    assert not equal(first[:4], first[4:])
    assert equal(first, [found[8 * 10**9 + i] for i in range(8)])
    with pytest.raises(IndexError):
        found[10**12]
