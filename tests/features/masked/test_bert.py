"""Samples of BERT: against the sentences that they are made of, whose tokens are all different."""

import pickle

import numpy as np
import pytest
import torch

from megatron.config import ConfigError
from megatron.data.index_cache import IndexCache
from megatron.data.loader import MicroBatches
from megatron.features.masked.batch import collate_bert, predicted_positions
from megatron.features.masked.bert import BertRecipe
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.segments import surplus

CLS, SEP, PAD, MASK, VOCAB_SIZE = 1, 2, 0, 3, 400_000
TASKS = ("none", "sentence-order", "next-sentence")


def config(pairs: str = "sentence-order", **changes) -> MaskedDataConfig:
    if pairs == "none":
        return MaskedDataConfig(**changes)
    return MaskedDataConfig(bert_pair_task=pairs, **changes)


def build(documents, tokenizer, pairs="sentence-order", samples=600, seq_length=128, **changes):
    masked = config(pairs, **changes)
    recipe = BertRecipe.from_config(masked, tokenizer, seq_length, 1234, pairs != "none")
    units = range(recipe.units(documents))
    return recipe.build(documents, units, samples, "train", IndexCache(None))


def unmasked(sample) -> np.ndarray:
    return np.where(sample.labels_S >= 0, sample.labels_S, sample.tokens_S)


def segments_of(sample, pairs) -> list[np.ndarray]:
    """The segments, with every mark around them checked."""
    used = int(sample.padding_mask_S.sum())
    assert sample.padding_mask_S.tolist() == [1] * used + [0] * (len(sample.tokens_S) - used)
    text = unmasked(sample)
    separators = np.flatnonzero(text == SEP)
    assert text[0] == CLS and (text[used:] == PAD).all()
    assert separators.tolist()[-1] == used - 1
    assert len(separators) == (1 if pairs == "none" else 2)
    first = separators[0]
    types = [0] * (first + 1) + [1] * (used - first - 1) + [0] * (len(text) - used)
    assert sample.types_S.tolist() == types
    return [text[1:first], text[first + 1 : used - 1]][: len(separators)]


@pytest.mark.parametrize("pairs", TASKS)
def test_samples_are_the_sentences_they_say(pairs, prose, tokenizer):
    dataset = build(prose, tokenizer, pairs)
    assert len(dataset) == 600
    random = 0
    for i in range(600):
        sample = dataset[i]
        segments = segments_of(sample, pairs)
        text = np.concatenate(segments)
        origin = [
            prose.get(piece.sequence, piece.start, piece.stop - piece.start)
            for piece in dataset.origin(i)
        ]
        assert {piece.source for piece in dataset.origin(i)} == {"counting"}
        assert text.tolist() == np.concatenate(origin).tolist()
        # Tokens of a segment follow each other, so its ends say which documents it is of.
        documents = [{prose.document_of(s[0]), prose.document_of(s[-1])} for s in segments]
        for segment, found in zip(segments, documents, strict=True):
            assert len(segment) and len(found) == 1
            assert (np.diff(segment) == 1).all()  # neighbours in the corpus: nothing is left out
        random += sample.is_random
        if pairs == "none":
            assert sample.is_random == 0
        elif pairs == "sentence-order":
            assert documents[0] == documents[1]
            assert sample.is_random == (segments[0][0] > segments[1][0])
        else:
            assert sample.is_random == (documents[0] != documents[1])
            assert sample.is_random or segments[0][-1] < segments[1][0]
        if (
            pairs != "none"
            and len(text) < 125
            and not (pairs == "next-sentence" and sample.is_random)
        ):
            assert np.ptp(text) + 1 == len(text)  # no token was cut off between the segments
    if pairs != "none":
        assert abs(random - 300) < 5 * np.sqrt(600 / 4)


@pytest.mark.parametrize("pairs", TASKS)
@pytest.mark.parametrize("max_preds", [7, pytest.param(None, marks=pytest.mark.proof)])
def test_masks(pairs, max_preds, prose, tokenizer):
    dataset = build(prose, tokenizer, pairs, max_preds_per_seq=max_preds)
    share, masked, kept, total = [], 0, 0, 0
    begins_word = tokenizer.word_starts
    for i in range(600):
        sample = dataset[i]
        text, chosen = unmasked(sample), sample.labels_S >= 0
        assert sample.loss_mask_S.tolist() == chosen.astype(float).tolist()
        assert (sample.labels_S[~chosen] == -1).all()
        assert not np.isin(text[chosen], (CLS, SEP, PAD)).any()
        assert 1 <= chosen.sum() <= (max_preds or 20)
        total += int(chosen.sum())
        masked += int((sample.tokens_S[chosen] == MASK).sum())
        kept += int((sample.tokens_S[chosen] == text[chosen]).sum())
        share.append(chosen.sum() / sample.padding_mask_S.sum())
        inside = np.flatnonzero(~begins_word[text] & (text >= 1000))
        for position in inside[~np.isin(text[inside - 1], (CLS, SEP))]:
            assert chosen[position] == chosen[position - 1]  # whole words
    for count, chance in ((masked, 0.8), (kept, 0.1)):
        assert abs(count - chance * total) < 5 * np.sqrt(chance * (1 - chance) * total)
    if max_preds is None:
        assert abs(np.mean(share) - 0.15) < 0.01


@pytest.mark.parametrize("pairs", TASKS)
def test_samples_do_not_depend_on_order_or_process(pairs, prose, tokenizer, tmp_path):
    def fresh(cache, samples):
        recipe = BertRecipe.from_config(config(pairs), tokenizer, 128, seed=1234)
        return recipe.build(prose, range(10, 300), samples, "train", cache)

    def equal(one, other):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))

    whole = fresh(IndexCache(None), 900)
    cached = [fresh(IndexCache(tmp_path), 300) for _ in range(2)][1]
    assert len(list(tmp_path.glob("bert-train-*/description.json"))) == 1
    copy = pickle.loads(pickle.dumps(cached))
    for i in (299, 0, 17, 120, 17):
        assert equal(whole[i], cached[i]) and equal(whole[i], copy[i])
    first, last = int(prose.document_indices[10]), int(prose.document_indices[300])
    pieces = [piece for i in range(300) for piece in cached.origin(i)]
    assert all(first <= piece.sequence < last for piece in pieces)
    for index in (-1, 300):
        with pytest.raises(IndexError, match=f"sample {index} of a dataset of 300"):
            cached[index]


def test_packed_rows_are_the_samples_of_an_epoch(counting, tokenizer):
    """Each once, whole, in a row with others; padding is little. More rows begin with the same."""
    documents = counting([[7, 20, 31], [40, 12], [60, 60, 3], [25], [5, 5, 5]] * 8)
    flags = {"seq_length": 96, "bert_packing": True}
    rows = build(documents, tokenizer, "none", samples=4, **flags)
    more = build(documents, tokenizer, "none", samples=2 * len(rows), **flags)
    assert 4 <= len(rows) < len(more)
    texts, padding = [], 0
    for i in range(len(rows)):
        row = rows[i]
        assert all(map(np.array_equal, row, more[i]))
        ids_S, used = row.document_ids_S, int(row.padding_mask_S.sum())
        padding += 96 - used
        assert (ids_S[used:] == ids_S[:used].max() + 1).all() and (row.labels_S[used:] == -1).all()
        whole_S = unmasked(row)
        for number in range(ids_S[:used].max() + 1):
            own = ids_S == number
            text = whole_S[own]
            assert text[0] == CLS and text[-1] == SEP and CLS not in text[1:]
            assert 1 <= row.loss_mask_S[own].sum() <= 20
            texts.append(tuple(text[1:-1]))
    assert len(texts) == len(set(texts)) and padding < 0.1 * 96 * len(rows)
    alone = build(documents, tokenizer, "none", samples=len(texts), seq_length=96)
    first = {tuple(segments_of(alone[i], "none")[0]) for i in range(len(texts))}
    # Which tokens of a sample that is too long are cut off depends on its number.
    whole = {text for text in first if len(text) < 94}
    assert whole and whole == {text for text in texts if len(text) < 94}
    row = rows[0]
    words = int(row.padding_mask_S.sum()) - np.isin(unmasked(row), (CLS, SEP)).sum()
    assert sum(piece.stop - piece.start for piece in rows.origin(0)) == words
    batch = collate_bert([rows[0], rows[1]])
    starts = batch.document_ids_BS.diff(dim=1, prepend=torch.tensor([[-1], [-1]])) != 0
    assert (batch.position_ids_BS == 0).equal(starts)
    assert ((batch.position_ids_BS.diff(dim=1) == 1) | starts[:, 1:]).all()
    with pytest.raises(ConfigError, match="--bert-packing .* add --bert-no-binary-head"):
        build(documents, tokenizer, bert_packing=True)


@pytest.mark.parametrize(
    "change", [{"seed": 5}, {"seq_length": 127}, {"short_seq_prob": 0.2}, {"pairs": "none"}]
)
def test_another_order_has_another_cache_entry(change, prose, tokenizer, tmp_path):
    values = {"seed": 1, "seq_length": 128, "short_seq_prob": 0.1, "pairs": "sentence-order"}
    for settings in (values, values | change):
        flags = config(settings["pairs"], short_seq_prob=settings["short_seq_prob"])
        paired = settings["pairs"] != "none"
        recipe = BertRecipe.from_config(
            flags, tokenizer, settings["seq_length"], settings["seed"], paired
        )
        recipe.build(prose, range(50), 40, "train", IndexCache(tmp_path))
    assert len(list(tmp_path.glob("bert-*/description.json"))) == 2


def test_other_boundaries_have_another_cache_entry(counting, tokenizer, tmp_path):
    """Equal lengths of sentences, shared out to other documents."""
    datasets = []
    for documents in ([[5, 5, 5, 5], [5, 5]], [[5, 5], [5, 5, 5, 5]]):
        recipe = BertRecipe.from_config(config(), tokenizer, 128, 1)
        cache = IndexCache(tmp_path)
        datasets.append(recipe.build(counting(documents), range(2), 9, "train", cache))
    assert len(list(tmp_path.glob("bert-*/description.json"))) == 2


def test_parts_and_samples_have_masks_of_their_own(prose, tokenizer):
    recipe = BertRecipe.from_config(config("none", short_seq_prob=0.0), tokenizer, 128, 1)
    one = np.array([10])
    masks = set()
    for part in ("train", "valid"):
        dataset = recipe.build(prose, range(50, 51), 40, part, IndexCache(None))
        masks |= {tuple(np.flatnonzero(dataset[i].loss_mask_S).tolist()) for i in range(40)}
    assert len(masks) > 75 and one


@pytest.mark.parametrize("workers", [0, 2])
def test_through_the_loader(workers, prose, tokenizer):
    dataset = build(prose, tokenizer, samples=40)
    batches = MicroBatches(dataset, collate_bert, micro_batch_size=4, num_workers=workers)
    found = [next(batches) for _ in range(10)]
    batches.close()
    assert found[0].tokens_BS.shape == (4, 128) and found[0].is_random_B.shape == (4,)
    batch = found[0].to("cpu")
    dtypes = [str(each.dtype).removeprefix("torch.") for each in batch if torch.is_tensor(each)]
    assert dtypes == ["int64", "int64", "int64", "int64", "float32", "int64", "int64"]
    for i in range(40):
        for name, value in dataset[i]._asdict().items():
            column = found[i // 4]._asdict()[
                name.replace("_S", "_BS").replace("random", "random_B")
            ]
            if value is None:  # not packed
                assert column is None
            else:
                assert np.array_equal(column[i % 4].numpy(), value)


def test_positions_of_a_batch_are_those_of_its_predictions(prose, tokenizer):
    dataset = build(prose, tokenizer, samples=40)
    for first in range(0, 40, 4):
        batch = collate_bert([dataset[first + n] for n in range(4)])
        most = int(batch.loss_mask_BS.sum(1).max())
        assert batch.positions_BP.shape == (4, -(-most // 8) * 8)
        for positions_P, mask_S in zip(batch.positions_BP, batch.loss_mask_BS, strict=True):
            predicted = mask_S.nonzero().flatten().tolist()
            assert positions_P[: len(predicted)].tolist() == predicted
            assert len(set(positions_P.tolist())) == len(positions_P)
            assert not mask_S[positions_P[len(predicted) :]].any()
    unpredicted = predicted_positions(torch.zeros(2, 5))
    assert unpredicted.tolist() == [[0, 1, 2, 3, 4]] * 2


def test_against_truncation_one_by_one():
    """google-research/bert: while they are too long, a token off the longer one, else off B."""
    for first in range(1, 30):
        for second in range(1, 30):
            for limit in (2, 9, 20, 60):
                lengths = [first, second]
                while sum(lengths) > limit:
                    lengths[0 if lengths[0] > lengths[1] else 1] -= 1
                cut = surplus([first, second], limit)
                assert [first - cut[0], second - cut[1]] == lengths
    assert surplus([10], 7) == [3] and surplus([5], 7) == [0]


def test_long_sentences_are_read_whole(counting, tokenizer):
    """A document that was not split: each of its tokens is in some sample of an epoch."""
    documents = counting([[1000], [30]])
    dataset = build(documents, tokenizer, "none", samples=9, short_seq_prob=0.0)
    seen = {token for i in range(9) for token in segments_of(dataset[i], "none")[0].tolist()}
    assert len(seen) == 1030  # 8 of 126 tokens each but the last, and one of 30


def test_pairs_need_sentences(counting, tokenizer):
    """Parts of a document longer than a sample could be pairs, but are not its sentences."""
    documents = counting([[1000], [20], [], [300]])
    message = "none of the 4 documents is split into sentences.*--split-sentences.*--bert-no-binary"
    with pytest.raises(ValueError, match=f"^{documents.prefix}: {message}"):
        build(documents, tokenizer)
    assert len(build(documents, tokenizer, "none")) == 600


def test_cuts_are_at_both_ends(counting, tokenizer):
    documents = counting([[120, 120]] * 20)
    dataset = build(documents, tokenizer, samples=200, short_seq_prob=0.0)
    starts = [int(segments_of(dataset[i], "sentence-order")[0][0] - 1000) % 120 for i in range(200)]
    # 120 of 125 tokens fit of both: about 57 or 58 are cut off each, half of them in front.
    assert 24 < np.mean(starts) < 34 and np.std(starts) < 8


@pytest.mark.parametrize(
    "changes, seq_length, message",
    [
        ({"mask_prob": 0.0}, 128, "--mask-prob 0.0"),
        ({"mask_prob": 1.0}, 128, "--mask-prob 1.0"),
        ({"short_seq_prob": 1.5}, 128, "--short-seq-prob 1.5"),
        ({"max_ngrams": 0}, 128, "--max-ngrams 0"),
        ({"max_preds_per_seq": 0}, 128, "--max-preds-per-seq 0"),
        ({}, 4, "--seq-length 4"),
    ],
)
def test_flags_are_checked(changes, seq_length, message, tokenizer):
    with pytest.raises(ConfigError, match=message):
        BertRecipe.from_config(MaskedDataConfig(**changes), tokenizer, seq_length, 1)


def test_no_task_for_a_head_that_is_left_out(tokenizer):
    flags = config("next-sentence")
    with pytest.raises(ConfigError, match="--bert-pair-task next-sentence .*--bert-no-binary-head"):
        BertRecipe.from_config(flags, tokenizer, 128, 1, binary_head=False)


def test_default_of_max_preds_per_seq(tokenizer):
    """Megatron of 2019: ceil(seq_length * 0.15 / 10) * 10."""
    for seq_length, expected in ((512, 80), (128, 20), (64, 10)):
        recipe = BertRecipe.from_config(MaskedDataConfig(), tokenizer, seq_length, 1)
        assert recipe.masking.max_predictions == expected


def test_shortest_sample(counting, tokenizer):
    for pairs, seq_length in (("sentence-order", 5), ("next-sentence", 5), ("none", 4)):
        dataset = build(counting([[9, 9, 9]] * 3), tokenizer, pairs, 50, seq_length)
        for i in range(50):
            segments = segments_of(dataset[i], pairs)
            assert 2 - (pairs == "none") <= sum(map(len, segments)) <= 2
            assert dataset[i].loss_mask_S.sum() in (1, 2)  # one word
