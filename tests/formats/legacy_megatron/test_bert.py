"""BERT as Megatron-LM wrote it: read from files in its layout, written in the same layout."""

import dataclasses

import pytest
import torch
from configs import run_config
from rank_files import assert_same_tree, rank_file

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.source import locate_checkpoint
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint
from megatron.formats.legacy_megatron.writer import write_megatron

PUBLISHED = {
    "num_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "num_query_groups": 2,
    "kv_channels": 64, "ffn_hidden_size": 512,
}  # fmt: skip
RELEASED = {"iteration": None, "arguments": None, "spelling": ("transformer", "attention"),
            "zipped": False}  # fmt: skip


def opened(path):
    return MegatronCheckpoint(MegatronCheckpoint.locate(path, None))


def canonical(weights, tied=True):
    """The same by our names."""
    bias = "embedding.word_embeddings.bias" if tied else "output_layer.bias"
    return {
        bias if name == "lm_head.bias" else name.replace("lm_head.layernorm", "lm_head.norm"): value
        for name, value in weights.items()
    }


def assert_holds(source, weights, kind="weight"):
    assert set(source.names()) == set(weights)
    for name, whole in weights.items():
        assert source.shape(name) == tuple(whole.shape), name
        assert torch.equal(source.tensor(name, kind), whole.float()), name


@pytest.mark.parametrize(
    ("version", "tensor", "pipeline", "virtual"),
    [(0, 1, 1, 1), (1, 2, 2, 1), (2, 2, 1, 1), (3, 2, 2, 2)],
)
@pytest.mark.parametrize("binary_head", [True, False])
def test_what_is_read(
    binary_head, version, tensor, pipeline, virtual, tmp_path, legacy_model, bert_weights,
    write_legacy,
):  # fmt: skip
    model = legacy_model(family="bert", bert_binary_head=binary_head)
    weights = bert_weights(model)
    arguments = {"bert_binary_head": binary_head}
    write_legacy(tmp_path, weights, model, version, tensor, pipeline, virtual, arguments=arguments)
    source = opened(tmp_path)
    assert_holds(source, canonical(weights))
    assert source.model == dataclasses.replace(model, vocabulary=source.model.vocabulary)
    assert locate_checkpoint(tmp_path).form.family(source.folder) == "bert"


@pytest.mark.parametrize(
    ("size", "rows", "tensor"),
    [(30522, 30592, 2), pytest.param(28996, 29056, 1, marks=pytest.mark.proof)],
)
def test_nvidia_zip_layout(
    size, rows, tensor, tmp_path, legacy_model, bert_weights, write_legacy, archived
):
    """Uncased and cased."""
    model = legacy_model(
        family="bert", **PUBLISHED, unpadded_vocab_size=size, padded_vocab_size=rows
    )
    weights = bert_weights(model)
    write_legacy(tmp_path / "save", weights, model, None, tensor, **RELEASED)
    path = archived(tmp_path / "save", tmp_path / "bert.zip")
    source = opened(path)
    assert_holds(source, canonical(weights))
    actual = source.model
    assert (actual.family, actual.vocabulary.size, actual.bert_binary_head) == ("bert", size, True)
    assert (actual.mlp.activation, actual.head_activation) == ("gelu_tanh", "gelu_erf")
    assert locate_checkpoint(path).form.family(source.folder) == "bert"


def test_an_untied_output_head(tmp_path, legacy_model, bert_weights, write_legacy):
    changes = {"untie_embeddings_and_output_weights": True}
    model = legacy_model(family="bert", **changes)
    weights = bert_weights(model)
    write_legacy(tmp_path / "legacy", weights, model, 3, 2)
    source = opened(tmp_path / "legacy")
    assert_holds(source, canonical(weights, tied=False))
    write_megatron(source, tmp_path / "again", 1, 2)
    assert_holds(opened(tmp_path / "again"), canonical(weights, tied=False))


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize("post_norm", [False, True])
def test_what_is_written(
    post_norm, tensor, pipeline, tmp_path, legacy_model, bert_weights, write_legacy
):
    """The same dictionaries and tensors as the test's own writer makes of the weights."""
    model = legacy_model(family="bert", apply_residual_connection_post_layernorm=post_norm)
    weights = bert_weights(model)
    arguments = {"apply_residual_connection_post_layernorm": post_norm}
    by_hand = write_legacy(tmp_path / "a", weights, model, 3, tensor, pipeline, arguments=arguments)
    source = opened(tmp_path / "a")
    native = write_checkpoint(tmp_path / "native", source, moments=False)
    reader = CheckpointReader(native)
    assert_holds(reader, canonical(weights))
    assert reader.config.model.norm.apply_residual_connection_post_layernorm == post_norm
    written = write_megatron(reader, tmp_path / "b", tensor, pipeline, 100)
    names = sorted(path.relative_to(by_hand) for path in by_hand.rglob("*.pt"))
    assert names == sorted(path.relative_to(written) for path in written.rglob("*.pt"))
    for name in names:
        here, there = (rank_file(folder / name)["model"] for folder in (by_hand, written))
        assert_same_tree(here, there)
    assert opened(tmp_path / "b").model == source.model


LABELS, CHOICES = {"head": "classification", "num_labels": 3}, {"head": "multiple_choice"}


@pytest.mark.parametrize(
    ("head", "version", "tensor", "pipeline"),
    [(LABELS, 0, 1, 1), (LABELS, 3, 2, 2), (CHOICES, 3, 1, 2), (CHOICES, 2, 2, 1)],
)
def test_heads_for_labelled_text(
    head, version, tensor, pipeline, tmp_path, legacy_model, bert_weights, write_legacy
):
    """As Megatron's tasks write them, read, and written again with the same tensors."""
    model = legacy_model(family="bert", **head)
    weights = bert_weights(model)
    by_hand = write_legacy(tmp_path / "a", weights, model, version, tensor, pipeline)
    source = opened(tmp_path / "a")
    assert_holds(source, weights)
    assert source.model == dataclasses.replace(model, vocabulary=source.model.vocabulary)
    if version < 3:
        return
    native = write_checkpoint(tmp_path / "native", source, moments=False)
    written = write_megatron(CheckpointReader(native), tmp_path / "b", tensor, pipeline, 100)
    for path in by_hand.rglob("*.pt"):
        name = path.relative_to(by_hand)
        here, there = (rank_file(folder / name)["model"] for folder in (by_hand, written))
        assert_same_tree(here, there)
    assert opened(tmp_path / "b").model == source.model


@pytest.mark.parametrize(("tensor", "pipeline", "virtual"), [(1, 1, 1), (2, 2, 2)])
def test_optimizer(
    tensor, pipeline, virtual, tmp_path, legacy_model, bert_weights, write_legacy, adam_run
):
    model = legacy_model(family="bert")
    weights = bert_weights(model, dtype=torch.float16)
    adam = adam_run(torch.float16)
    write_legacy(tmp_path, weights, model, 2, tensor, pipeline, virtual, adam=adam)
    source = opened(tmp_path)
    assert source.notes == [] and source.state["optimizer_step"] == 2
    params = {name: torch.nn.Parameter(values.float()) for name, values in weights.items()}
    optimizer, _ = adam.step(list(params.values()))
    assert_holds(source, canonical({name: param.detach() for name, param in params.items()}))
    for kind in ("exp_avg", "exp_avg_sq"):
        state = {name: optimizer.state[param][kind] for name, param in params.items()}
        assert_holds(source, canonical(state), kind)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_tokentypes": 3}, "--num-tokentypes 2, or 0 with --bert-no-binary-head"),
        ({"bert_binary_head": False, "num_tokentypes": 2}, "--num-tokentypes 2, or 0"),
        ({"lm_head_activation": "relu"}, "no --lm-head-activation"),
        ({"add_bias_linear": False}, "no --disable-bias-linear"),
        ({"embed_layernorm": True}, "no --embed-layernorm"),
        ({"head": "span"}, "another head than for spans"),
    ],
)
def test_what_megatron_does_not_have(changes, wanted, tmp_path, legacy_model):
    source = MegatronCheckpoint.__new__(MegatronCheckpoint)
    source.model = legacy_model(family="bert", **changes)
    with pytest.raises(ValueError, match=f"a checkpoint of Megatron requires .*{wanted}"):
        write_megatron(source, tmp_path)


def test_heads_that_differ_from_the_arguments(tmp_path, legacy_model, bert_weights, write_legacy):
    model = legacy_model(family="bert")
    write_legacy(tmp_path, bert_weights(model), model, arguments={"bert_binary_head": False})
    with pytest.raises(CheckpointError, match=r"pooler.dense.weight is not part of the network"):
        opened(tmp_path)


def test_a_bert_is_no_gpt(tmp_path, legacy_model, bert_weights, write_legacy):
    model = legacy_model(family="bert")
    folder = write_legacy(tmp_path, bert_weights(model), model)
    with pytest.raises(CheckpointError, match="has a model of the family bert, not gpt"):
        run = run_config(legacy_model())
        file = folder / "mp_rank_00" / "model_optim_rng.pt"
        content = rank_file(file)
        del content["args"]
        torch.save(content, file)
        MegatronCheckpoint(folder, run.model)
