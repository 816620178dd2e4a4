"""Bins of samples: batches and rates against DeepSpeed's functions, and what a run does with
them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.data_pipeline.data_sampling import variable_batch_size_and_lr as variable

from megatron.config import ConfigError
from megatron.data.index_cache import IndexCache
from megatron.data.sampler import SkippedSamples
from megatron.features.curriculum.flags import CurriculumConfig
from megatron.features.curriculum.packing.data import BinCollator, PackedLengths, StepsOfBins, pack
from megatron.features.curriculum.packing.section import SamplePacking, packed, packing_of, picked
from megatron.features.evaluation.checkpoints import MadeSamples
from megatron.features.masked.batch import BertSample, collate_bert

PACKING = SamplePacking(
    max_tokens=40,
    min_samples=1,
    max_samples=None,
    order="dataloader",
    scaling="linear",
    metrics_path=None,
    seed=7,
    passes=1000,
    verbose=False,
)


def section(**keys):
    batching = {"enabled": True, "max_tokens": 40} | keys
    sampling = {"enabled": True, "dynamic_batching": batching}
    return json.dumps({"enabled": True, "seed": 7, "data_sampling": sampling})


def lengths(count=200, longest=30):
    return np.random.default_rng(3).integers(1, longest, count)


@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_samples": 3},
        {"min_samples": 1, "equal": True},
        {"max_samples": 2, "equal": True},
        {"max_tokens": 25},
    ],
)
def test_bins_are_deepspeeds(order, changes):
    """In the order picked, to which a sample is added: DeepSpeed leaves out the last one."""
    packing, values, step = replace(PACKING, order=order, **changes), lengths(), 4
    numbers = picked(values, packing)
    if order == "seqlen":
        pairs = sorted(zip(values, range(len(values)), strict=True))
        assert numbers.tolist() == [number for _, number in pairs]
    micro_batches, sizes, _ = variable.batch_by_seqlens(
        [*values[numbers].tolist(), packing.max_tokens],
        packing.max_tokens,
        min_batch_size=packing.min_samples,
        max_batch_size=packing.max_samples,
        effective_batch_size=step,
        required_microbatches_of_same_size=packing.equal,
    )
    theirs = [numbers[ids].tolist() for _, ids in micro_batches]
    bins = packed(values, packing, step)
    ours = [each.tolist() for each in np.split(bins.numbers, bins.ends[:-1])]
    assert ours == theirs and len(ours) > 20
    for method in ("linear", "sqrt", "none"):
        scaled = replace(packing, scaling=method)
        for number, size in enumerate(sizes):
            counted = sum(map(len, ours[step * number : step * (number + 1)]))
            factor = variable.scale_lr(step, size, 1.0, method)
            assert scaled.rate_factor(counted, step) == pytest.approx(factor, rel=1e-15)


def test_the_random_order_is_deepspeeds():
    values = lengths(50)
    packing = replace(PACKING, order="random", max_samples=1)
    theirs, _, _ = variable.batch_by_seqlens(
        values, 40, max_batch_size=1, sequence_picking_order="random", seed=7
    )
    assert [ids[0] for _, ids in theirs] == picked(values, packing).tolist()[:-1]


def test_one_sample_without_a_bin_does_not_end_the_data():
    """DeepSpeed stops where a bin would have too few samples, and reads nothing after it."""
    values = np.array([10, 10, 39, 39, 10, 10, 10, 10])
    bins = packed(values, replace(PACKING, min_samples=2), 1)
    assert [each.tolist() for each in np.split(bins.numbers, bins.ends[:-1])] == [
        [0, 1], [4, 5, 6, 7]
    ]  # fmt: skip
    assert bins.left_out == 2


def test_samples_above_the_limit_are_left_out_and_too_few_are_refused():
    bins = packed(np.array([50, 10, 10, 60, 10]), PACKING, 1)
    assert bins.numbers.tolist() == [1, 2, 4] and bins.left_out == 2
    with pytest.raises(ValueError, match="make 1 bins of 1 samples or more .* max_tokens 40"):
        packed(np.array([50, 10, 10, 60, 10]), PACKING, 2)


def sample(length):
    tokens = np.arange(1, length + 1)
    places = np.arange(0, length, 3)
    return BertSample.padded(
        tokens, np.zeros_like(tokens), places, tokens[places], 0, seq_length=32, pad=0
    )


def bert_samples(count=60):
    return MadeSamples(lengths(count).tolist(), sample)


def test_items_are_bins_over_and_over():
    dataset = bert_samples()
    items = pack(dataset, PACKING, 2, 100, IndexCache(None))
    bins = items.dataset
    assert len(items) == 100 > len(bins)
    sizes = [[int(each.padding_mask_S.sum()) for each in items[i].samples] for i in range(100)]
    assert all(sum(each) <= 40 for each in sizes) and len({len(each) for each in sizes}) > 2
    assert sizes[len(bins)] == sizes[0]
    for count in (0, 1, 7, len(bins), len(bins) + 3, 100):
        samples, tokens = bins.before(count)
        assert samples == sum(map(len, sizes[:count])) and tokens == sum(map(sum, sizes[:count]))
    with pytest.raises(ValueError, match="num_epochs 1 allows"):
        pack(dataset, replace(PACKING, passes=1), 2, 100, IndexCache(None))


def test_batches_have_rows_of_their_longest_sample_and_weights():
    items = pack(bert_samples(), PACKING, 2, 10, IndexCache(None))
    collate = BinCollator(collate_bert, 8)
    batch = collate([items[0], items[1]])
    samples = [*items[0].samples, *items[1].samples]
    longest = max(int(each.padding_mask_S.sum()) for each in samples)
    assert batch.tokens_BS.shape == (len(samples), -(-longest // 8) * 8)
    predicted = sum(each.loss_mask_S.sum() for each in samples)
    assert batch.weights_2.tolist() == [len(samples), predicted]
    evaluated = collate(samples[:2])  # of no bin: as without this section
    assert evaluated.tokens_BS.shape == (2, 32) and evaluated.weights_2 is None
    whole = BinCollator(collate_bert, None)([items[0]])  # of a pipeline
    assert torch.equal(whole.tokens_BS, collate_bert(items[0].samples).tokens_BS)


def test_tokens_are_counted_without_skipped_bins():
    items = pack(bert_samples(), PACKING, 2, 12, IndexCache(None))
    skipped = SkippedSamples(items, (range(2, 5),))
    plan = SimpleNamespace(lengths=PackedLengths(32))
    assert plan.lengths.tokens(3) == 96  # before the data are known
    data = SimpleNamespace(datasets=SimpleNamespace(train=skipped))
    StepsOfBins(PACKING, SimpleNamespace(data=data, plan=plan))
    read = [sum(int(s.padding_mask_S.sum()) for s in skipped[i].samples) for i in range(7)]
    assert [plan.lengths.tokens(n) for n in range(8)] == [sum(read[:n]) for n in range(8)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_tokens": None}, "max_tokens is missing; it must be an integer of at least 1"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_batch_size": 3, "max_batch_size": 2}, "max_batch_size is 2; .* min_batch_size 3"),
        ({"sentence_picking_order": "random"}, "nearest known key is sequence_picking_order"),
        ({"sequence_picking_order": "length"}, "must be dataloader or random or seqlen"),
        ({"lr_scaling_method": "log"}, "must be linear or sqrt or none"),
        ({"verbose": 1}, "verbose is 1; it must be true or false"),
        ({"metrics_path": 1}, "metrics_path is 1; it must be a folder"),
    ],
)
def test_wrong_sections(keys, message):
    with pytest.raises(ConfigError, match=message) as caught:
        packing_of(CurriculumConfig(data_efficiency=section(**keys)))
    assert "data_efficiency.data_sampling.dynamic_batching" in str(caught.value)


def test_defaults_are_deepspeeds():
    packing = packing_of(CurriculumConfig(data_efficiency=section()))
    assert packing == PACKING
    assert packing_of(CurriculumConfig(data_efficiency=section(enabled=False))) is None
