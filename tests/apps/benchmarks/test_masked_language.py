"""How benchmarks/masked_language.py reads samples back into text."""

from types import SimpleNamespace

import masked_language
import numpy as np

from megatron.features.masked.batch import BertSample
from megatron.features.masked.t5 import SpanCorruption, T5Recipe

TOKENIZER = SimpleNamespace(mask=4, sentinels=[90, 91, 92, 93], eos=95)


def test_text_of_a_bert_sample():
    shown = np.array([2, 4, 11, 50, 3])
    sample = BertSample.padded(
        shown, np.zeros(5, int), np.array([1, 3]), np.array([10, 12]), 0, seq_length=8, pad=0
    )
    found = masked_language.bert_text(sample, TOKENIZER)
    assert found.text.tolist() == [2, 10, 11, 12, 3]
    assert found.hidden.tolist() == [1, 3] and found.shown.tolist() == [4, 50]
    part = masked_language.masked_alone(sample, TOKENIZER)
    assert part.loss_mask_S.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_text_of_a_t5_sample():
    recipe = T5Recipe(40, 24, 1, 0.0, SpanCorruption(0.3, 3.0, 10), 95, 0, 0, (90, 91, 92, 93), 96)
    text = np.arange(10, 38)
    for seed in range(20):
        sample = recipe.sample([text], False, np.random.default_rng(seed))
        found = masked_language.t5_text(sample, TOKENIZER)
        assert found.text.tolist() == [95, *text, 95]
        hidden = found.text[found.hidden]
        assert not set(hidden) & set(sample.encoder_tokens_E)
        part = masked_language.spans_alone(sample, TOKENIZER)
        assert sample.labels_D[part.loss_mask_D > 0].tolist() == hidden.tolist()
