"""Samples of T5: putting the spans back gives the text."""

import pickle

import numpy as np
import pytest

from megatron.config import ConfigError
from megatron.data.index_cache import IndexCache
from megatron.data.loader import MicroBatches
from megatron.features.masked.batch import collate_t5
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.t5 import SpanCorruption, T5Recipe

PAD, EOS = 0, 4
SENTINELS = list(range(100, 200))


def build(documents, tokenizer, samples=300, lengths=(128, None), **changes):
    recipe = T5Recipe.from_config(MaskedDataConfig(**changes), tokenizer, lengths, seed=1234)
    units = range(recipe.units(documents))
    return recipe.build(documents, units, samples, "train", IndexCache(None))


def put_together(sample) -> tuple[list[int], list[int]]:
    """The text and the sizes of its spans, with every mark around them checked."""
    encoder = sample.encoder_tokens_E[sample.encoder_padding_mask_E == 1].tolist()
    labels = sample.labels_D[sample.loss_mask_D == 1].tolist()
    decoder = sample.decoder_tokens_D[sample.decoder_padding_mask_D == 1].tolist()
    assert decoder == [PAD, *labels[:-1]]
    assert encoder[-1] == labels[-1] == EOS
    for tokens, mask, padding in (
        (sample.encoder_tokens_E, sample.encoder_padding_mask_E, PAD),
        (sample.decoder_tokens_D, sample.decoder_padding_mask_D, PAD),
        (sample.labels_D, sample.loss_mask_D, -1),
    ):
        used = int(mask.sum())
        assert mask.tolist() == [1] * used + [0] * (len(mask) - used)
        assert (tokens[used:] == padding).all()
    spans: list[list[int]] = []
    for token in labels[:-1]:
        if token in SENTINELS:
            assert token == SENTINELS[len(spans)]  # each once, in order
            spans.append([])
        else:
            spans[-1].append(token)
    text, used = [], 0
    for token in encoder[:-1]:
        if token in SENTINELS:
            assert token == SENTINELS[used]
            assert not used or encoder[encoder.index(token) - 1] not in SENTINELS
            text += spans[used]
            used += 1
        else:
            text.append(token)
    assert used == len(spans)
    return text, [len(span) for span in spans]


@pytest.mark.parametrize("changes", [{}, {"short_seq_prob": 0.9}, {"mask_prob": 0.5}])
def test_spans_put_back_give_the_source(changes, prose, tokenizer):
    dataset = build(prose, tokenizer, **changes)
    for i in range(300):
        text, sizes = put_together(dataset[i])
        source = [
            token
            for piece in dataset.origin(i)
            for token in prose.get(piece.sequence, piece.start, piece.stop - piece.start).tolist()
        ]
        assert text == source
        assert np.ptp(text) + 1 == len(text)  # neighbours in the corpus
        assert len({prose.document_of(token) for token in text}) == 1
        share = changes.get("mask_prob", 0.15)
        assert abs(sum(sizes) - len(text) * share) <= 1
        assert all(1 <= size <= 10 for size in sizes)


def test_the_decoder_starts_with_another_token(prose, tokenizer):
    plain = build(prose, tokenizer)[3]
    sample = build(prose, tokenizer, decoder_start_token="bos")[3]
    assert (plain.decoder_tokens_D[0], sample.decoder_tokens_D[0]) == (PAD, tokenizer.bos)
    assert (sample.decoder_tokens_D[1:] == plain.decoder_tokens_D[1:]).all()
    assert (sample.labels_D == plain.labels_D).all()


def test_counts_of_t5():
    """Raffel et al.: 512 tokens of input, 568 of text, 114 of targets; and short ones."""
    rule = SpanCorruption(0.15, 3.0, 10)
    assert rule.most_tokens(512, 128) == 568
    assert rule.counts(568) == (85, 28, 512, 114)
    assert rule.counts(1) == (1, 1, 2, 3)
    assert rule.counts(2) == (1, 1, 3, 3)
    assert rule.most_tokens(512, 50) == 249  # 37 in 12 spans, and the end: 50
    assert rule.most_tokens(2, 2) == 0


@pytest.mark.parametrize("density", [0.01, 0.15, 0.5, 0.9])
@pytest.mark.parametrize("mean, longest", [(1.0, 1), (3.0, 10), (3.0, 3), (8.0, 9)])
def test_every_length(density, mean, longest):
    """All texts up to 200 tokens: spans within the text, apart, of the promised numbers."""
    rule = SpanCorruption(density, mean, longest)
    for tokens in range(1, 200):
        noise, spans, encoder, decoder = rule.counts(tokens)
        starts, sizes = rule.draw(tokens, np.random.default_rng(tokens))
        assert len(starts) == len(sizes) == spans and sizes.sum() == noise
        assert (sizes >= 1).all() and starts[0] >= 0 and starts[-1] + sizes[-1] <= tokens
        assert (starts[1:] > starts[:-1] + sizes[:-1]).all()
        assert sizes.max() <= max(longest, -(-noise // spans))
        assert encoder == tokens - noise + spans + 1 and decoder == noise + spans + 1


def test_places_are_even():
    """4 tokens in 2 spans of 10, 2000 times: all ways are as likely. 5 standard deviations."""
    rule = SpanCorruption(0.4, 2.0, 10)
    assert rule.counts(10)[:2] == (4, 2)
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(8000):
        starts, sizes = rule.draw(10, np.random.default_rng([3, seed]))
        key = (*starts.tolist(), *sizes.tolist())
        counts[key] = counts.get(key, 0) + 1
    # Sizes 1+3, 2+2, 3+1; the 6 tokens left in 3 gaps, the inner one at least 1: C(7, 2) = 21.
    assert len(counts) == 63
    expected = 8000 / 63
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi_square < 62 + 5 * np.sqrt(2 * 62)


def test_mean_and_longest_span():
    rule = SpanCorruption(0.15, 3.0, 10)
    sizes = np.concatenate([rule.draw(568, np.random.default_rng(s))[1] for s in range(300)])
    assert abs(sizes.mean() - 85 / 28) < 1e-9
    assert sizes.max() == 10 and sizes.min() == 1


def test_samples_do_not_depend_on_order_or_process(prose, tokenizer, tmp_path):
    recipe = T5Recipe.from_config(MaskedDataConfig(), tokenizer, (128, None), seed=1)
    whole = recipe.build(prose, range(300), 500, "train", IndexCache(None))
    cached = recipe.build(prose, range(300), 200, "train", IndexCache(tmp_path))
    copy = pickle.loads(pickle.dumps(cached))
    for i in (199, 3, 77, 3):
        for one, other, third in zip(whole[i], cached[i], copy[i], strict=True):
            assert np.array_equal(one, other) and np.array_equal(one, third)
    with pytest.raises(IndexError, match="sample 200 of a dataset of 200"):
        cached[200]


@pytest.mark.parametrize("workers", [0, 2])
def test_through_the_loader(workers, prose, tokenizer):
    dataset = build(prose, tokenizer, 20)
    batches = MicroBatches(dataset, collate_t5, micro_batch_size=4, num_workers=workers)
    found = [next(batches) for _ in range(5)]
    batches.close()
    assert found[0].encoder_tokens_BE.shape == (4, 128)
    assert found[0].labels_BD.shape == found[0].decoder_tokens_BD.shape == (4, 64)
    for i in range(20):
        for column, value in zip(found[i // 4].to("cpu"), dataset[i], strict=True):
            assert np.array_equal(column[i % 4].numpy(), value)
            assert str(column.dtype) in ("torch.int64", "torch.float32")


def test_text_that_is_not_split_into_sentences(counting, tokenizer):
    """One sequence per document, as for GPT: all of it is read."""
    dataset = build(counting([[1000], [300]]), tokenizer, 12, short_seq_prob=0.0)
    seen = {token for i in range(12) for token in put_together(dataset[i])[0]}
    assert dataset.recipe.rules.max_tokens == 141
    assert len(seen) == 1300  # 8 samples of the first document, 3 of the second, and one more


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mean_noise_span_length": 0.5}, "--mean-noise-span-length 0.5"),
        ({"max_noise_span_length": 2}, "--max-noise-span-length 2 is below"),
        ({"lengths": (512, 2)}, "--decoder-seq-length 2 are too short"),
        ({"lengths": (2, None)}, "--encoder-seq-length 2"),
        ({"mask_prob": 2.0}, "--mask-prob 2.0"),
        ({"lengths": (2000, None)}, "100 sentinels .* --vocab-extra-ids 111"),
    ],
)
def test_flags_are_checked(changes, message, tokenizer):
    lengths = changes.get("lengths", (512, None))
    config = {name: value for name, value in changes.items() if name != "lengths"}
    with pytest.raises(ConfigError, match=message):
        T5Recipe.from_config(MaskedDataConfig(**config), tokenizer, lengths, 1)


def test_a_short_decoder_shortens_the_encoder(tokenizer, caplog):
    recipe = T5Recipe.from_config(MaskedDataConfig(), tokenizer, (512, 50), 1)
    assert recipe.rules.max_tokens == 249 and recipe.encoder_length == 512
    assert "--decoder-seq-length 50 is less than the 114" in caplog.text
