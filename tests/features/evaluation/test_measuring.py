"""Which samples are in which micro batch, without an engine's layers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron.config import ConfigError
from megatron.data.texts import ScoredText
from megatron.families import family_of
from megatron.features.evaluation import checkpoints
from megatron.features.evaluation.checkpoints import ROUNDS, WASTE, measure_samples
from megatron.model.spec import Measure

VALUE = Measure(("value",), lambda state, batch: {}, per_sample=True)


class Rank:
    """A rank of an engine whose numbers are the samples themselves. ``seen`` are the samples and
    padded lengths of its batches, run by run."""

    def __init__(self, stages: int = 1, slices: int = 1, device: str = "cpu") -> None:
        self.device = torch.device(device)
        group = lambda size: SimpleNamespace(size=size, rank=0)  # noqa: E731
        self.mesh = SimpleNamespace(samples=group(1), pipeline=group(stages), tensor=group(slices))
        parallel = SimpleNamespace(length_divisor=slices)
        self.config, self.seen = SimpleNamespace(parallel=parallel), []

    def measured(self, batches, count, measure):
        """See `ModelEngine.measured`."""
        own = [next(batches) for _ in range(count)]
        self.seen.append(own)
        return [torch.tensor([[v] for v in samples]).double() for samples, _ in own]


@pytest.fixture(autouse=True)
def the_last_stage(monkeypatch):
    """This process is the stage that has the numbers."""
    monkeypatch.setattr(checkpoints, "_from_last_stage", lambda rows, pipeline: rows)


def together(samples, pad_to=None):
    return list(samples), pad_to


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_once_in_the_order_of_the_data(count, size):
    done, engine = [], Rank()
    lengths = np.random.default_rng(0).integers(1, 40, count)
    for given in (None, lengths):
        found = measure_samples(
            engine, range(100, 100 + count), together, VALUE, size, given, done.append
        )
        assert found["value"].tolist() == list(range(100, 100 + count))
        assert done[-1] == count and done == sorted(done)
        done.clear()
        # Of equal sizes, so that no more than one sample of a batch is repeated in the last one.
        (own,) = {len(samples) for run in engine.seen for samples, _ in run}
        batches = sum(map(len, engine.seen))
        assert batches == -(-count // size) and count <= own * batches < count + batches
        engine.seen.clear()


def test_no_sample():
    assert measure_samples(Rank(), [], together, VALUE, 2)["value"].shape == (0,)


@pytest.mark.parametrize(
    ("device", "slices", "multiple"), [("cpu", 1, 1), ("cpu", 3, 3), ("cuda", 3, 24)]
)
def test_the_longest_samples_come_first_and_share_batches(device, slices, multiple):
    lengths = np.random.default_rng(0).permutation(40) + 1
    engine = Rank(slices=slices, device=device)
    measure_samples(engine, range(40), together, VALUE, 4, lengths)
    batches = [batch for run in engine.seen for batch in run]
    longest = [max(lengths[number] for number in samples) for samples, _ in batches]
    assert longest == list(range(40, 0, -4))
    for (_, pad_to), needed in zip(batches, longest, strict=True):
        assert needed <= pad_to < needed + multiple and pad_to % multiple == 0


def test_a_pipeline_gets_one_shape_in_a_run():
    lengths = np.arange(1, 401)
    engine = Rank(stages=2, device="cuda")
    measure_samples(engine, range(400), together, VALUE, 4, np.stack([lengths, lengths % 9 + 1], 1))
    assert len(engine.seen) > 5
    for run in engine.seen:
        ((encoder, decoder),) = {pad_to for _, pad_to in run}
        assert len(run) <= 2 * ROUNDS and decoder in (8, 16)
        least = min(max(lengths[number] for number in samples) for samples, _ in run)
        assert encoder <= WASTE * (-(-least // 8) * 8)


def text(context, continuation):
    return ScoredText(np.arange(context), np.arange(continuation))


def test_a_text_needs_tokens():
    with pytest.raises(ValueError, match="the context of a text to score needs .*end-of-document"):
        text(0, 1)
    with pytest.raises(ValueError, match="the continuation of a text to score needs at least one"):
        text(1, 0)


def config(kind="learned_absolute", longest=8, slices=1):
    positions = SimpleNamespace(longest=longest if kind != "alibi" else None)
    parallel = SimpleNamespace(length_divisor=slices)
    return SimpleNamespace(model=SimpleNamespace(positions=positions), parallel=parallel)


def test_a_batch_of_gpt():
    gpt = family_of("gpt")
    batch = gpt.scored_batch(config(), None, [text(3, 2), text(1, 4)], 8)
    assert batch.tokens_BS.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 0, 1, 2, 0, 0, 0, 0]]
    assert batch.labels_BS.tolist() == [[1, 2, 0, 1, 0, 0, 0, 0], [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch.positions_BP.tolist() == [[2, 3, 0, 1], [0, 1, 2, 3]]
    assert batch.loss_mask_BS.sum(1).tolist() == [2, 4]
    # All of them: nothing has to be taken.
    assert gpt.scored_batch(config(), None, [text(1, 4)]).positions_BP is None


def test_what_is_too_long_for_the_model():
    gpt = family_of("gpt")
    assert gpt.scored_batch(config(), None, [text(4, 5)], 16).tokens_BS.shape == (1, 8)
    with pytest.raises(ValueError, match="up to 9 tokens, and the model has 8 positions"):
        gpt.scored_batch(config(), None, [text(4, 5), text(4, 6)])
    assert gpt.scored_batch(config("alibi"), None, [text(4, 6)]).tokens_BS.shape == (1, 9)


def test_ranks_divide_a_text_that_fills_an_odd_number_of_positions():
    batch = family_of("gpt").scored_batch(config(longest=7, slices=2), None, [text(4, 4)] * 2, 8)
    assert batch.tokens_BS.shape == (2, 8)
    assert batch.position_ids_BS.tolist() == [[0, 1, 2, 3, 4, 5, 6, 6]] * 2


def test_a_family_that_predicts_no_text():
    with pytest.raises(ConfigError, match="the family bert .* cannot score text"):
        family_of("bert").scored_batch(config(), None, [text(1, 1)])
