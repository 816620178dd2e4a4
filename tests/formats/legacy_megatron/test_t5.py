"""T5 as Megatron-LM of 2023 wrote it: read from files made here by the facts of its layout, written
in the same layout, and both ways at every size."""

import argparse

import pytest
import torch
from configs import model_config
from rank_files import assert_same_tree, rank_file

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.legacy_megatron.writer import write_megatron

HIDDEN, WIDE, HEADS, HEAD_DIM, WORDS, ROWS, LENGTH = 16, 24, 4, 6, 61, 64, 12
ENCODER, DECODER = 4, 2
MODEL = {
    "family": "t5", "encoder_decoder": True, "num_layers": ENCODER, "decoder_num_layers": DECODER,
    "hidden_size": HIDDEN, "ffn_hidden_size": WIDE, "num_attention_heads": HEADS,
    "num_query_groups": HEADS, "kv_channels": HEAD_DIM, "seq_length": LENGTH,
    "decoder_seq_length": 8, "max_position_embeddings": LENGTH, "unpadded_vocab_size": WORDS,
    "padded_vocab_size": ROWS, "make_vocab_size_divisible_by": 16,
}  # fmt: skip
ARGUMENTS = {
    "encoder_num_layers": ENCODER, "decoder_num_layers": DECODER, "num_layers": ENCODER,
    "hidden_size": HIDDEN, "ffn_hidden_size": WIDE, "num_attention_heads": HEADS,
    "kv_channels": HEAD_DIM, "seq_length": LENGTH, "encoder_seq_length": LENGTH,
    "decoder_seq_length": 8, "max_position_embeddings": LENGTH, "layernorm_epsilon": 1e-5,
    "position_embedding_type": "learned_absolute", "add_position_embedding": True,
    "bias_gelu_fusion": True, "add_bias_linear": True, "padded_vocab_size": ROWS,
    "make_vocab_size_divisible_by": 16, "tokenizer_type": "NullTokenizer",
    "vocab_size": WORDS - 1, "vocab_extra_ids": 0, "consumed_train_samples": 800,
    "normalization": "layernorm", "untie_embeddings_and_output_weights": False,
}  # fmt: skip
PARTS = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.proj": "self_attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
ENCODER_PARTS = PARTS | {"mlp_norm": "post_attention_layernorm"}
DECODER_PARTS = PARTS | {
    "cross_attention_norm": "post_attention_layernorm",
    "cross_attention.q": "inter_attention.query",
    "cross_attention.kv": "inter_attention.key_value",
    "cross_attention.proj": "inter_attention.dense",
    "mlp_norm": "post_inter_attention_layernorm",
}
INNER = HEADS * HEAD_DIM
SHAPES = {
    "attention.qkv": (3 * INNER, HIDDEN), "attention.proj": (HIDDEN, INNER),
    "cross_attention.q": (INNER, HIDDEN), "cross_attention.kv": (2 * INNER, HIDDEN),
    "cross_attention.proj": (HIDDEN, INNER), "mlp.up": (WIDE, HIDDEN), "mlp.down": (HIDDEN, WIDE),
}  # fmt: skip


def t5_weights(seed=0):
    """Whole parameters by canonical name, written down by hand."""
    shapes = {
        "embedding.word_embeddings.weight": (WORDS, HIDDEN),
        "embedding.position_embeddings.weight": (LENGTH, HIDDEN),
    }
    for stack, parts, layers in (
        ("encoder", ENCODER_PARTS, ENCODER), ("decoder", DECODER_PARTS, DECODER),
    ):  # fmt: skip
        for n in range(layers):
            for part in parts:
                shape = SHAPES.get(part, (HIDDEN,))
                shapes[f"{stack}.layers.{n}.{part}.weight"] = shape
                shapes[f"{stack}.layers.{n}.{part}.bias"] = shape[:1]
        for kind in ("weight", "bias"):
            shapes[f"{stack}.final_norm.norm.{kind}"] = (HIDDEN,)
    shapes["embedding.word_embeddings.bias"] = (WORDS,)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def ordered_rows(matrices, version, rank, size):
    """Which canonical row each row of a rank's query-key-value or key-value matrix is."""
    mine = range(rank * HEADS // size, (rank + 1) * HEADS // size)
    every = [
        (part, head, i) for part in range(matrices) for head in mine for i in range(HEAD_DIM)
    ]  # fmt: skip
    if version == 1:
        every.sort(key=lambda row: (row[1], row[2], row[0]))
    elif version > 1:
        every.sort(key=lambda row: (row[1], row[0], row[2]))
    return [(part * HEADS + head) * HEAD_DIM + i for part, head, i in every]


def share(name, whole, version, rank, size):
    """A tensor-parallel rank's part of a parameter, as Megatron holds it."""
    if "word_embeddings" in name:
        padding = torch.full((ROWS - WORDS, *whole.shape[1:]), 7.0)
        return torch.cat([whole, padding]).chunk(size)[rank].clone()
    for part, matrices in ((".attention.qkv.", 3), (".cross_attention.kv.", 2)):
        if part in name:
            return whole[ordered_rows(matrices, version, rank, size)]
    if ".mlp.up." in name or ".cross_attention.q." in name:
        return whole.chunk(size)[rank].clone()
    if name.endswith(("proj.weight", "down.weight")):
        return whole.chunk(size, 1)[rank].clone()
    return whole.clone()


def rank_model(weights, version, tensor, stages):
    """The nested dictionary of a rank; ``stages`` are its pipeline rank, that where the decoder
    starts, and their number."""
    rank, split, size = stages
    local = {name: share(name, whole, version, *tensor) for name, whole in weights.items()}
    # Only a pipeline of one rank has both stacks.
    alone = size == 1
    encodes, decodes = alone or rank < split, alone or rank >= split
    language = {}
    if rank in (0, split):  # the decoder's first rank has a copy
        language["embedding"] = {
            kind: {"weight": local[f"embedding.{kind}.weight"]}
            for kind in ("word_embeddings", "position_embeddings")
        }
    for stack, parts, layers, there, place, ranks in (
        ("encoder", ENCODER_PARTS, ENCODER, encodes, rank, 1 if alone else split),
        ("decoder", DECODER_PARTS, DECODER, decodes, 0 if alone else rank - split,
         1 if alone else size - split),
    ):  # fmt: skip
        if not there:
            continue
        blocks, each = {}, layers // ranks
        for n in range(each):
            for part, theirs in parts.items():
                for kind in ("weight", "bias"):
                    values = local[f"{stack}.layers.{place * each + n}.{part}.{kind}"]
                    blocks[f"layers.{n}.{theirs}.{kind}"] = values
        if place == ranks - 1:
            for kind in ("weight", "bias"):
                blocks[f"final_layernorm.{kind}"] = local[f"{stack}.final_norm.norm.{kind}"]
        language[stack] = blocks
    actual = {"language_model": language}
    if rank == size - 1:
        actual["lm_head"] = {"bias": local["embedding.word_embeddings.bias"]}
        if not alone:
            copy = local["embedding.word_embeddings.weight"].clone()
            actual["word_embeddings_for_head"] = {"weight": copy}
    return actual


def write_t5(save, weights, version=3, tensor=1, pipeline=1, split=None, arguments=(),
             change=lambda content: None):  # fmt: skip
    """Writes iteration 100 as Megatron does; returns its folder."""
    for t in range(tensor):
        for p in range(pipeline):
            namespace = ARGUMENTS | {
                "tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline,
                "pipeline_model_parallel_split_rank": split,
            } | dict(arguments)  # fmt: skip
            content = {
                "args": argparse.Namespace(**namespace), "iteration": 100,
                "checkpoint_version": float(version),
                "model": rank_model(weights, version, (t, tensor), (p, split or 0, pipeline)),
            }  # fmt: skip
            change(content)
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pipeline > 1 else "")
            (save / "iter_0000100" / name).mkdir(parents=True)
            torch.save(content, save / "iter_0000100" / name / "model_optim_rng.pt")
    (save / "latest_checkpointed_iteration.txt").write_text("100")
    return save / "iter_0000100"


def opened(save):
    return MegatronCheckpoint(MegatronCheckpoint.locate(save, None))


@pytest.mark.parametrize(
    ("version", "tensor", "pipeline", "split"),
    [
        (0, 1, 1, None), (1, 2, 1, None), (2, 4, 1, None), (3, 1, 2, 1), (3, 2, 3, 2),
        (3, 1, 6, 4),
    ],
)  # fmt: skip
def test_what_is_read(version, tensor, pipeline, split, tmp_path):
    weights = t5_weights()
    write_t5(tmp_path, weights, version, tensor, pipeline, split)
    actual = opened(tmp_path)
    assert set(actual.names()) == set(weights)
    for name, whole in weights.items():
        assert torch.equal(actual.tensor(name), whole), name
    assert (actual.tensor_size, actual.pipeline_size) == (tensor, pipeline)
    assert actual.model == model_config(**MODEL)
    assert MegatronCheckpoint.family(actual.folder) == "t5"


@pytest.mark.parametrize(
    ("tensor", "pipeline", "split"), [(1, 1, None), (2, 1, None), (4, 3, 2), (1, 6, 4)]
)
def test_what_is_written(tensor, pipeline, split, tmp_path):
    """The same dictionaries, tensors and arguments as the writer above, then read again bit for bit
    through our own format too."""
    weights = t5_weights()
    write_t5(tmp_path / "first", weights)
    source = CheckpointReader(write_checkpoint(tmp_path / "ours", opened(tmp_path / "first")))
    assert source.model == model_config(**MODEL)
    folder = write_megatron(source, tmp_path / "found", tensor, pipeline, 100)
    expected = write_t5(tmp_path / "wanted", weights, 3, tensor, pipeline, split)
    paths = sorted(path.relative_to(expected) for path in expected.rglob("*.pt"))
    assert sorted(path.relative_to(folder) for path in folder.rglob("*.pt")) == paths
    for path in paths:
        here, there = (rank_file(root / path) for root in (expected, folder))
        assert_same_tree(here["model"], there["model"])
        for name, value in vars(here["args"]).items():
            if name not in ("consumed_train_samples", "normalization", "vocab_size"):
                assert getattr(there["args"], name) == value, name
    again = opened(tmp_path / "found")
    assert again.model == source.model
    assert all(torch.equal(again.tensor(name), whole) for name, whole in weights.items())


def test_sizes_that_do_not_divide_the_stacks(tmp_path):
    write_t5(tmp_path / "first", t5_weights())
    with pytest.raises(
        ValueError, match="--target-pipeline-parallel-size 7: .* 4 layers of the encoder .* 2 of"
    ):
        write_megatron(opened(tmp_path / "first"), tmp_path / "found", 1, 7)
    with pytest.raises(ValueError, match="--target-tensor-parallel-size 3 must divide"):
        write_megatron(opened(tmp_path / "first"), tmp_path / "found", 3, 1)
    assert not (tmp_path / "found").exists()


def test_stacks_that_differ_from_the_arguments(tmp_path):
    write_t5(tmp_path, t5_weights(), arguments={"decoder_num_layers": 3})
    with pytest.raises(CheckpointError, match="decoder_num_layers is 3, but the files have 2"):
        opened(tmp_path)


def test_sentinels_count_as_tokens(tmp_path):
    """Megatron's WordPiece appends [BOS], [EOS] and the sentinels."""
    weights = t5_weights()
    for name in ("embedding.word_embeddings.weight", "embedding.word_embeddings.bias"):
        weights[name] = torch.zeros(30720, *weights[name].shape[1:])
    rows = {"padded_vocab_size": 30720, "make_vocab_size_divisible_by": 128}
    kind = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_extra_ids": 100, "vocab_size": None}

    def whole(content):
        for place in (content["model"]["language_model"]["embedding"]["word_embeddings"],):
            place["weight"] = weights["embedding.word_embeddings.weight"]
        content["model"]["lm_head"]["bias"] = weights["embedding.word_embeddings.bias"]

    write_t5(tmp_path, t5_weights(), arguments=rows | kind, change=whole)
    assert opened(tmp_path).model.vocabulary.size == 30522 + 2 + 100
