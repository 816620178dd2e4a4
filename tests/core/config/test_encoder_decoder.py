"""Flags of models with an encoder and a decoder, and where a pipeline starts the decoder."""

import pytest

from megatron.config import ConfigError, Resolved, Setting, resolve

MODEL = {
    "num_layers": 6, "decoder_num_layers": 3, "hidden_size": 8, "num_attention_heads": 2,
    "encoder_seq_length": 32, "decoder_seq_length": 16, "micro_batch_size": 1,
    "global_batch_size": 8, "train_iters": 1, "lr": 1e-3,
}  # fmt: skip


def resolved(processes: int = 1, decoder: bool = True, **changes) -> Resolved:
    values = {name: value for name, value in (MODEL | changes).items() if value is not None}
    settings = {
        name: Setting(value, f"flag --{name.replace('_', '-')}") for name, value in values.items()
    }
    return resolve(settings | {"encoder_decoder": Setting(decoder, "family")}, processes)


def pipeline(ranks: int, split: int, **changes) -> Resolved:
    layout = {"pipeline_model_parallel_size": ranks, "pipeline_model_parallel_split_rank": split}
    return resolved(ranks, **layout | changes)


@pytest.mark.features
@pytest.mark.parametrize(
    "ranks, split, partition",
    [(2, 1, "6,3"), (4, 1, "6,1,1,1"), (4, 2, "3,3,2,1"), (5, 4, "1,1,2,2,3"), (4, 3, "2,2,2,3")],
)
def test_the_decoder_starts_at_a_rank(ranks, split, partition):
    """The stages with the embeddings and with the head have fewer blocks where they differ."""
    assert pipeline(ranks, split).config.parallel.pipeline_partition == partition


@pytest.mark.features
@pytest.mark.parametrize(
    "ranks, split, changes, message",
    [
        (4, 4, {}, "split-rank 4: encoder and decoder need .* from 1 to 3"),
        (4, 0, {}, "split-rank 0: encoder and decoder need .* from 1 to 3"),
        (1, 1, {}, "split-rank 1: .* must be left out"),
        (8, 7, {}, "split-rank 7 leaves 7 processes to --num-layers 6"),
        (8, 4, {}, "split-rank 4 leaves 4 processes to --decoder-num-layers 3"),
        (2, 1, {"pipeline_schedule": "interleaved"}, "split-rank 1 divides the processes .* 2"),
        (2, 1, {"pipeline_partition": "6,3"}, "split-rank 1 contradicts --pipeline-partition 6,3"),
        (
            2,
            1,
            {"decoder": False, "decoder_num_layers": None, "decoder_seq_length": None},
            "split-rank 1: this model has no decoder",
        ),
    ],
)
def test_a_rank_where_no_decoder_can_start(ranks, split, changes, message):
    with pytest.raises(ConfigError, match=message):
        pipeline(ranks, split, **changes)


def test_the_encoders_names_of_layers_and_length():
    model = resolved(num_layers=None, encoder_num_layers=4, decoder_num_layers=None).config.model
    assert (model.num_layers, model.decoder_num_layers, model.blocks) == (4, 4, 8)
    assert (model.seq_length, model.decoder_seq_length) == (32, 16)
    with pytest.raises(ConfigError, match="--encoder-seq-length 32 contradicts --seq-length 64"):
        resolved(seq_length=64)


def test_a_rank_has_whole_slices_of_both_sequences():
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    with pytest.raises(ConfigError, match="parallel-size 2 must divide --decoder-seq-length 15"):
        resolved(2, **split, decoder_seq_length=15)
    assert resolved(2, **split)
