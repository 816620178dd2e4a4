"""Checkpoints in Megatron's layout, written by the tests' own writer, are read back bit by bit."""

import re
import zipfile

import pytest
import torch

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.slices import Slice
from megatron.formats.inspection import verify_all
from megatron.formats.legacy_megatron.reader import MegatronCheckpoint


def opened(path, wanted=None):
    return MegatronCheckpoint(MegatronCheckpoint.locate(path, wanted))


def assert_holds(source, weights, kind="weight"):
    assert list(source.names()) and set(source.names()) == set(weights)
    for name, whole in weights.items():
        assert source.shape(name) == tuple(whole.shape), name
        actual = source.tensor(name, kind)
        assert actual.dtype == torch.float32
        assert torch.equal(actual, whole.float()), name


GPT2_CASES = [
    (version, tensor, pipeline)
    for version in (0, 1, 2, 3)
    for tensor in (1, 2, 4)
    for pipeline in (1, 2)
]
SAMPLE = {(0, 1, 1), (0, 2, 2), (1, 2, 1), (2, 4, 1), (3, 1, 2), (3, 4, 2)}


@pytest.mark.parametrize(
    ("version", "tensor", "pipeline"),
    [pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.proof) for case in GPT2_CASES],
)
def test_gpt2(version, tensor, pipeline, tmp_path, legacy_model, random_weights, write_legacy):
    model = legacy_model(padded_vocab_size=64)
    weights = random_weights(model)
    write_legacy(tmp_path, weights, model, version, tensor, pipeline)
    source = opened(tmp_path)
    assert_holds(source, weights)
    assert (source.tensor_size, source.pipeline_size) == (tensor, pipeline)
    assert list(source.names())[0] == "embedding.word_embeddings.weight"
    held = Slice((61, 16), ((0, ((5, 20),)),), 7, 100)
    whole = weights["embedding.word_embeddings.weight"]
    part = source.read("embedding.word_embeddings.weight", "weight", held)
    assert torch.equal(part, whole.reshape(-1)[5 * 16 + 7 : 5 * 16 + 100])


@pytest.mark.parametrize(
    ("tensor", "pipeline"), [(1, 1), (2, 2), pytest.param(2, 1, marks=pytest.mark.proof)]
)
def test_llama(tensor, pipeline, tmp_path, legacy_model, random_weights, write_legacy):
    model = legacy_model(llama=True)
    weights = random_weights(model)
    write_legacy(tmp_path, weights, model, 3, tensor, pipeline)
    source = opened(tmp_path)
    assert_holds(source, weights)
    for field in ("num_query_groups", "kv_channels", "activation", "normalization",
                  "untie_embeddings_and_output_weights",
                  "position_embedding_type", "add_bias_linear", "ffn_hidden_size"):  # fmt: skip
        assert source.model.shaping()[field] == model.shaping()[field], field


@pytest.mark.parametrize(("pipeline", "virtual", "tensor"), [(2, 2, 1), (1, 2, 2), (1, 4, 1)])
def test_virtual_stages(
    pipeline, virtual, tensor, tmp_path, legacy_model, random_weights, write_legacy
):
    model = legacy_model()
    weights = random_weights(model)
    write_legacy(tmp_path, weights, model, 3, tensor, pipeline, virtual)
    assert_holds(opened(tmp_path), weights)


def test_old_spellings_and_no_version(tmp_path, legacy_model, random_weights, write_legacy):
    """Before version 1 there was none, blocks were a transformer's, and files no zips."""
    model = legacy_model()
    weights = random_weights(model, dtype=torch.float16)
    write_legacy(
        tmp_path, weights, model, None, 2, spelling=("transformer", "attention"), zipped=False
    )
    source = opened(tmp_path)
    assert source.version == 0
    assert_holds(source, weights)
    assert source.dtype("final_norm.norm.weight") == "float16"


def nvidia_gpt2(legacy_model, random_weights, write_legacy, folder):
    """Heads of 64 and GPT-2's vocabulary as in the published model of 345M, but small; its file
    has neither arguments nor a version."""
    model = legacy_model(
        num_layers=2, hidden_size=128, num_attention_heads=2, num_query_groups=2, kv_channels=64,
        ffn_hidden_size=512, unpadded_vocab_size=50257, padded_vocab_size=50304,
    )  # fmt: skip
    weights = random_weights(model, dtype=torch.float16)
    write_legacy(
        folder, weights, model, None, iteration=None, arguments=None,
        spelling=("transformer", "attention"), zipped=False,
    )  # fmt: skip
    return model, weights


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_zip_archive(
    zipped, compression, tmp_path, legacy_model, random_weights, write_legacy, archived
):
    model = legacy_model()
    weights = random_weights(model)
    write_legacy(tmp_path / "save", weights, model, 3, 2, iteration=None, zipped=zipped)
    path = archived(tmp_path / "save", tmp_path / "megatron.zip", compression)
    before = sorted(tmp_path.rglob("*"))
    for spelling in (path, path / "release"):
        source = opened(spelling)
        assert source.folder == path / "release"
        assert_holds(source, weights)
    (verdict,) = verify_all(path)
    assert verdict.error is None and verdict.parameters == len(weights)
    assert (verdict.files, verdict.bytes) == (1, path.stat().st_size)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is unpacked to the disk"


def test_nvidia_345m_zip_layout(tmp_path, legacy_model, random_weights, write_legacy, archived):
    model, weights = nvidia_gpt2(legacy_model, random_weights, write_legacy, tmp_path / "save")
    path = archived(tmp_path / "save", tmp_path / "megatron_lm_345m_v0.0.zip")
    source = opened(path)
    assert_holds(source, weights)
    actual = source.model
    assert (
        actual.num_layers,
        actual.attention.num_attention_heads,
        actual.attention.kv_channels,
    ) == (
        2,
        2,
        64,
    )
    assert (actual.vocabulary.size, actual.mlp.activation) == (50257, "gelu_tanh")
    assert source.state == {}
    assert any("2 heads of 64" in note for note in source.notes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tensor", "pipeline", "virtual"), [(1, 1, 1), (2, 2, 2)])
def test_optimizer_against_torch_adamw(
    dtype, tensor, pipeline, virtual, tmp_path, legacy_model, random_weights, write_legacy, adam_run
):
    model = legacy_model()
    weights = random_weights(model, dtype=dtype)
    save = tmp_path / "save"
    write_legacy(save, weights, model, 1, tensor, pipeline, virtual, adam=adam_run(dtype))
    source = opened(save)
    assert source.notes == []
    params = {name: torch.nn.Parameter(values.float()) for name, values in weights.items()}
    optimizer, _ = adam_run(dtype).step(list(params.values()))
    assert_holds(source, {name: param.detach() for name, param in params.items()})
    for kind in ("exp_avg", "exp_avg_sq"):
        assert_holds(source, {n: optimizer.state[p][kind] for n, p in params.items()}, kind)
    assert source.kinds("final_norm.norm.bias") == ("weight", "exp_avg", "exp_avg_sq")
    assert source.state == {
        "iteration": 100, "consumed_samples": 800, "optimizer_step": 2, "loss_scaler": {},
    }  # fmt: skip


def swap_masters(content):
    masters = content["optimizer"]["fp32_from_fp16_params"][1]
    masters[0], masters[4] = masters[4], masters[0]


def swap_groups(content):
    inner = content["optimizer"]["optimizer"]
    inner["param_groups"][0]["params"], inner["param_groups"][1]["params"] = (
        inner["param_groups"][1]["params"], inner["param_groups"][0]["params"],
    )  # fmt: skip


def lose_steps(content):
    for state in content["optimizer"]["optimizer"]["state"].values():
        del state["step"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda c: c.pop("optimizer"), "there is no optimizer state"),
        (lambda c: c["optimizer"].update(optimizer={"param_groups": []}), "another form"),
        (swap_masters, "its float32 copy of .* is of other weights"),
        (swap_groups, "groups are not those of matrices"),
        (lambda c: c["optimizer"]["optimizer"]["state"].pop(3), "lacks that of"),
        (lose_steps, "does not say how many steps"),
        (lambda c: delattr(c["args"], "consumed_train_samples"), "how many steps and samples"),
        (lambda c: c["optimizer"]["optimizer"]["state"][2].update(exp_avg=torch.zeros(3)),
         "its exp_avg of .* has another shape"),
    ],
)  # fmt: skip
def test_an_optimizer_that_cannot_be_trusted_is_left(
    damage, reason, tmp_path, legacy_model, random_weights, write_legacy, adam_run
):
    model = legacy_model()
    weights = random_weights(model, dtype=torch.float16)
    adam = adam_run(torch.float16)
    write_legacy(tmp_path, weights, model, adam=adam, change=lambda content, *rank: damage(content))
    source = opened(tmp_path)
    assert source.state == {} and source.kinds("final_norm.norm.bias") == ("weight",)
    (note,) = source.notes
    assert note.startswith("weights only: ")
    assert re.search(reason, note), note


def test_a_vocabulary_of_unknown_size_stays_padded(
    tmp_path, legacy_model, random_weights, write_legacy
):
    model = legacy_model(unpadded_vocab_size=64)
    weights = random_weights(model)
    write_legacy(tmp_path, weights, model, arguments={"tokenizer_type": "Other"})
    source = opened(tmp_path)
    assert_holds(source, weights)
    assert any("64 rows, and the checkpoint does not say" in note for note in source.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 8}, "describe a network with layers.0.mlp.router.weight, which no file"),
        ({"attention_output_gate": True}, "attention_output_gate True"),
        ({"kv_channels": 5}, r"query_key_value.weight has the shape .*kv_channels"),
        ({"num_layers": 9999}, "num_layers is 9999, but the files have 4 blocks"),
        ({"num_layers": 10**9}, "--num-layers 1000000000 must be from 1 to"),
        ({"num_layers": 3}, "num_layers is 3, but the files have 4 blocks"),
        ({"swiglu": True}, r"dense_h_to_4h.weight has the shape \(24, 16\)"),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'; expected a value of type int"),
        ({"position_embedding_type": "relative"}, "position_embedding_type 'relative'"),
        ({"normalization": "ScaleNorm"}, "normalization 'ScaleNorm'"),
        ({"add_bias_linear": False}, "bias is not part of the network"),
        ({"tensor_model_parallel_size": 2}, "mp_rank_01/model_optim_rng.pt is missing"),
        ({"pipeline_model_parallel_size": 2}, "mp_rank_00_000/model_optim_rng.pt is missing|"
                                              "mp_rank_00_001/model_optim_rng.pt is missing"),
        ({"untie_embeddings_and_output_weights": True}, "with output_layer.weight, which no file"),
        ({"group_query_attention": True, "num_query_groups": 3}, "3 key and value heads"),
        ({"rope_factors": torch.ones(3)}, r"the effect of rope_factors = 'a tensor of \(3,\)'"),
        ({"layernorm_epsilon": torch.tensor(0.1)}, "layernorm_epsilon is 'a tensor of"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit(
    changes, message, tmp_path, legacy_model, random_weights, write_legacy
):
    model = legacy_model()
    write_legacy(tmp_path, random_weights(model), model, arguments=changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path)
    assert str(tmp_path / "iter_0000100") in str(caught.value)


def on_rank(place, act):
    def change(content, tensor, pipeline):
        if (tensor, pipeline) == place:
            act(content)

    return change


def blocks(content):
    return content["model"]["language_model"]["encoder"]


DAMAGES = {
    "iteration": (lambda c: c.update(iteration=200), "of iteration 200, .* of 100"),
    "version": (lambda c: c.update(checkpoint_version=2.0), "of version 2.0, .* of 3.0"),
    "unknown version": (lambda c: c.update(checkpoint_version=4.0), "has checkpoint_version 4.0"),
    "missing parameter": (
        lambda c: blocks(c).pop("layers.0.mlp.dense_4h_to_h.bias"),
        r"other parameters than .*layers.0.mlp.dense_4h_to_h.bias is missing",
    ),
    "shape": (
        lambda c: blocks(c).update({"layers.1.mlp.dense_4h_to_h.bias": torch.zeros(4)}),
        "layers.1.mlp.dense_4h_to_h.bias is",
    ),
    "no model": (lambda c: c.pop("model"), "has no model, nor model0"),
    "unknown name": (
        lambda c: c["model"]["language_model"].update(decoder={"x.weight": torch.zeros(1)}),
        r"other parameters than",
    ),
    "no tensor": (
        lambda c: blocks(c).update({"layers.1.mlp.dense_4h_to_h.bias": "text"}),
        "layers.1.mlp.dense_4h_to_h.bias is str, not a tensor",
    ),
    "args": (lambda c: c.update(args={"num_layers": 4}), "args are dict, not a namespace"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_files_that_do_not_belong_together(
    name, tmp_path, legacy_model, random_weights, write_legacy
):
    act, message = DAMAGES[name]
    model = legacy_model()
    write_legacy(tmp_path, random_weights(model), model, 3, 2, 2, change=on_rank((1, 1), act))
    with pytest.raises(CheckpointError, match=message) as caught:
        opened(tmp_path)
    assert "mp_rank_01_001" in str(caught.value)


def test_missing_and_truncated_files(tmp_path, legacy_model, random_weights, write_legacy):
    model = legacy_model()
    folder = write_legacy(tmp_path, random_weights(model), model, 3, 2, 2)
    shard = folder / "mp_rank_01_000" / "model_optim_rng.pt"
    whole = shard.read_bytes()
    for size in (0, 1, 3, 100, len(whole) // 2, len(whole) - 10):
        shard.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="mp_rank_01_000/model_optim_rng.pt"):
            opened(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match="mp_rank_01_000/model_optim_rng.pt is missing"):
        opened(tmp_path)


def test_a_missing_middle_block(tmp_path, legacy_model, random_weights, write_legacy):
    model = legacy_model()

    def drop(content, tensor, pipeline):
        for key in [key for key in blocks(content) if key.startswith("layers.1.")]:
            del blocks(content)[key]

    folder = write_legacy(tmp_path, random_weights(model), model, change=drop)
    with pytest.raises(CheckpointError, match=rf"{folder}.* has blocks \[0, 2, 3\]"):
        opened(tmp_path)


def test_a_damaged_archive(tmp_path, legacy_model, random_weights, write_legacy, archived):
    model = legacy_model()
    write_legacy(tmp_path / "save", random_weights(model), model, iteration=None)
    path = archived(tmp_path / "save", tmp_path / "m.zip", zipfile.ZIP_STORED)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m.zip/release/mp_rank_00/model_optim_rng.pt"):
        opened(path)


def test_nothing_is_kept_open_twice(tmp_path, legacy_model, random_weights, write_legacy):
    model = legacy_model()
    weights = random_weights(model)
    write_legacy(tmp_path, weights, model, 3, 1, 2)
    source = opened(tmp_path)
    for name in ("final_norm.norm.weight", "embedding.word_embeddings.weight"):
        source.tensor(name)
        assert len(source._open[1]) == 1, "files of one pipeline rank"
