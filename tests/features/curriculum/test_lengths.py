"""Lengths and tokens of a run, against a walk over its steps."""

import json
import math
import random

import numpy as np
import pytest
import torch

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.data.gpt_batch import GPTCollator
from megatron.features.curriculum.lengths import GrowingLengths, truncated
from megatron.features.curriculum.order import WithoutPadding
from megatron.features.masked.batch import BertSample, T5Batch, collate_bert
from megatron.training.plan import TrainingPlan

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 64 --lr 1 "
    "--micro-batch-size 2 --global-batch-size 8 "
)
LINEAR = {"total_curriculum_step": 9, "difficulty_step": 8}


def section(schedule_config, kind="fixed_linear", highest=64, lowest=8):
    return json.dumps(
        {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": lowest,
            "max_difficulty": highest,
            "schedule_type": kind,
            "schedule_config": schedule_config,
        }
    )


def plan(flags, text=None, processes=1):
    argv = [*(FLAGS + flags).split(), *(["--curriculum-learning", text] if text else [])]
    return TrainingPlan(resolve(FlagParser(*FLAG_CLASSES).settings(argv), processes).config)


def test_the_first_steps_of_a_schedule():
    """Step 1 of DeepSpeed's schedule is the first: 8 + 56 / 9 = 14.2, cut to 8."""
    course = plan("--train-iters 20", section(LINEAR))
    assert [course.lengths.at(i) for i in range(10)] == [8, 16, 24, 32, 32, 40, 48, 56, 64, 64]
    assert course.lengths.at(10**9) == 64
    assert course.lengths.grows and not plan("--train-iters 5").lengths.grows


@pytest.mark.parametrize("seed", range(30))
def test_tokens_against_a_walk(seed):
    rng = random.Random(seed)
    kind = rng.choice(["fixed_linear", "fixed_root", "fixed_discrete"])
    config = {"total_curriculum_step": rng.randrange(1, 50), "difficulty_step": 8}
    if kind == "fixed_root":
        config["root_degree"] = rng.choice([2, 3])
    if kind == "fixed_discrete":
        steps = sorted(rng.sample(range(1, 60), 3))
        config = {"difficulty": [8, 16, 40, 64], "max_step": steps}
    ramp = rng.choice(["", "--rampup-batch-size 2 2 60"])
    course = plan(f"--train-iters 60 {ramp}", section(config, kind))
    consumed, tokens = 0, [0]
    for iteration in range(60):
        size, length = course.batch_size.batch_size(consumed), course.lengths.at(iteration)
        assert course.lengths.tokens(consumed) == tokens[-1]
        middle = rng.randrange(size + 1)
        assert course.lengths.tokens(consumed + middle) == tokens[-1] + middle * length
        consumed += size
        tokens.append(tokens[-1] + size * length)
    for _ in range(50):
        expected = rng.randrange(1, tokens[-1])
        samples = course.lengths.samples(expected)
        assert course.lengths.tokens(samples) >= expected > course.lengths.tokens(samples - 1)


def test_a_run_of_tokens_counts_what_is_read():
    """8 samples of 8, 16, 24 tokens make 384."""
    for tokens, steps in ((384, 3), (383, 3), (360, 2), (385, 3), (384 + 8 * 32, 4)):
        assert plan(f"--train-tokens {tokens}", section(LINEAR)).train_iters == steps, tokens
    course = plan("--train-tokens 5000", section(LINEAR))
    assert course.progress(3, 24) == 384
    with pytest.raises(ConfigError, match="--train-tokens 56 is less than .*: 8 samples of 8 tok"):
        plan("--train-tokens 56", section(LINEAR))


def test_batches_of_a_run():
    assert plan("--train-iters 7").batch_sizes() == [(8, 7)]
    ramped = plan("--train-iters 9 --rampup-batch-size 4 4 12")
    assert ramped.batch_sizes() == [(4, 3), (8, 6)]


def test_lengths_beyond_the_samples():
    message = "curriculum_learning grows to sequences of 72 tokens, .* --seq-length 64"
    with pytest.raises(ConfigError, match=message):
        plan("--train-iters 5", section(LINEAR, highest=72))


def test_sequence_parallel_divides_every_length():
    """16 ranks cannot share 24 tokens."""
    argv = (
        "--num-layers 1 --hidden-size 64 --num-attention-heads 16 --seq-length 64 --lr 1 "
        "--micro-batch-size 2 --tensor-model-parallel-size 16 --sequence-parallel --train-iters 5"
    ).split()
    settings = FlagParser(*FLAG_CLASSES).settings([*argv, "--curriculum-learning", section(LINEAR)])
    with pytest.raises(
        ConfigError, match="of 8 tokens, which --sequence-parallel splits over --te"
    ):
        TrainingPlan(resolve(settings, 16).config)


def test_a_context_divides_every_length():
    """Each of 8 ranks has two pieces, which 24 tokens do not give."""
    argv = (
        "--num-layers 1 --hidden-size 64 --num-attention-heads 16 --seq-length 64 --lr 1 "
        "--micro-batch-size 2 --context-parallel-size 8 --train-iters 5"
    ).split()
    settings = FlagParser(*FLAG_CLASSES).settings([*argv, "--curriculum-learning", section(LINEAR)])
    with pytest.raises(ConfigError, match="size 8 cuts into 16 pieces: make .* multiples of 16"):
        TrainingPlan(resolve(settings, 8).config)


def test_batches_are_cut_one_at_a_time():
    """The step after this one cuts otherwise."""
    lengths = plan("--train-iters 20", section(LINEAR)).lengths
    batches = iter([GPTCollator()([np.arange(65)]) for _ in range(4)])
    first = lengths.cut(batches, 0)
    assert [next(first).tokens_BS.shape[1] for _ in range(2)] == [8, 8]
    assert next(lengths.cut(batches, 1)).tokens_BS.shape == (1, 16)
    assert lengths.cut(batches, 9) is batches
    assert len(list(batches)) == 1


def test_cut_batches_against_batches_of_cut_samples():
    """Every field: tokens, labels, loss masks, positions and documents."""
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 4, 33) for _ in range(3)]
    collate = GPTCollator(
        eod_token=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
    )
    for length in (8, 24, 32):
        actual = truncated(collate(samples), length)
        expected = collate([sample[: length + 1] for sample in samples])
        for ours, theirs in zip(actual[:5], expected[:5], strict=True):
            assert torch.equal(ours, theirs) and ours.is_contiguous()
    plain = truncated(GPTCollator()(samples), 8)
    assert plain.tokens_BS.shape == (3, 8) and plain.position_ids_BS is None


def bert_samples(*lengths, seq_length=32):
    """Samples of BERT with the tokens 1, 2 ... of which every third is to be predicted."""
    actual = []
    for length in lengths:
        tokens, places = np.arange(1, length + 1), np.arange(0, length, 3)
        parts = (tokens > 4).astype(np.int64), places, tokens[places] + 100, length % 2
        actual.append(BertSample.padded(tokens, *parts, seq_length=seq_length, pad=0))
    return actual


@pytest.mark.parametrize("length", [8, 16, 24])
def test_cut_batches_of_bert(length):
    """Tokens, types, labels and both masks are cut; whether the segments are swapped is kept."""
    whole = collate_bert(bert_samples(30, 5))
    actual = truncated(whole, length)
    for ours, theirs in zip(actual[:6], whole[:6], strict=True):
        expected = theirs if theirs.dim() == 1 else theirs[:, :length]
        assert torch.equal(ours, expected) and ours.is_contiguous()
    chosen = actual.loss_mask_BS.gather(1, actual.positions_BP)
    assert torch.equal(chosen.sum(1), actual.loss_mask_BS.sum(1))


@pytest.mark.parametrize(
    ("lengths", "multiple", "wanted"),
    [((5, 11, 8), 8, 16), ((5, 8), 8, 8), ((5, 9), 24, 24), ((5, 25), 8, 32), ((20,), 24, 24)],
)
def test_columns_of_padding_are_left_out(lengths, multiple, wanted):
    """The longest sample, rounded up; nothing but padding is lost."""
    whole = collate_bert(bert_samples(*lengths))
    actual = WithoutPadding(collate_bert, multiple)(bert_samples(*lengths))
    assert actual.tokens_BS.shape[1] == wanted
    assert torch.equal(actual.padding_mask_BS.sum(1), whole.padding_mask_BS.sum(1))
    assert int(actual.loss_mask_BS.sum()) == int(whole.loss_mask_BS.sum())
    assert torch.equal(actual.is_random_B, whole.is_random_B)


def test_batches_without_padding_stay():
    collate = WithoutPadding(GPTCollator(), 8)
    assert collate([np.arange(33)]).tokens_BS.shape == (1, 32)


def test_batches_of_other_models_are_refused():
    with pytest.raises(ValueError, match="a T5Batch cannot be cut: remove curriculum_learning"):
        truncated(T5Batch(*[torch.zeros(1, 16)] * 6), 8)


@pytest.mark.parametrize(("samples", "length"), [(4, 8), (3, 16), (1, 24), (2, 32), (5, 40)])
def test_folded_against_the_formula_on_texts(samples: int, length: int) -> None:
    """Rows of length + 1 tokens of each text, then the end of each; as many as the tokens make, an
    even number. Masks, positions and documents are those of the rows, but documents of a row are
    numbered as in its sample."""
    whole = 40
    text = np.random.default_rng(length).integers(0, 5, (samples, whole + 1))
    collate = GPTCollator(0, True, True, True)
    stages = [(0, length), (9, whole)]
    lengths = GrowingLengths(whole, stages, lambda steps: steps * samples, samples)
    (batch,) = lengths.cut(iter([collate(list(text))]), 0)
    width = length + 1
    keep = (whole + 1) // width * width
    rows = np.concatenate([text[:, :keep].reshape(-1, width), text[:, -width:]])
    count = min(math.ceil(text.size / width), len(rows))
    count -= count % 2 if count > 1 and length < whole else 0
    expected = collate(list(rows[: samples if length == whole else count]))
    for name in ("tokens_BS", "labels_BS", "loss_mask_BS", "position_ids_BS"):
        assert torch.equal(getattr(batch, name), getattr(expected, name)), name
    first = batch.document_ids_BS[:, :1]
    assert torch.equal(batch.document_ids_BS - first, expected.document_ids_BS)
    assert lengths.tokens(samples) == batch.tokens_BS.numel()
    assert lengths.tokens(9 * samples) == 9 * batch.tokens_BS.numel()
    assert lengths.samples(8 * batch.tokens_BS.numel()) == 8 * samples
