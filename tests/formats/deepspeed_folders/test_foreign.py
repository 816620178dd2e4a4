"""Folders of Megatron-DeepSpeed, BLOOM and GPT-NeoX, written here in exactly their layout."""

import argparse
import collections
import enum
import sys
import types
from pathlib import Path

import pytest
import torch
from configs import model_config, with_flags
from deepspeed.utils.tensor_fragment import fragment_address

from megatron.checkpoint.files import CheckpointError
from megatron.formats.deepspeed_folders import neox
from megatron.formats.deepspeed_folders.folder import DeepSpeedFolder
from megatron.formats.deepspeed_folders.universal import UniversalFolder
from megatron.formats.features import whole_shards
from megatron.formats.legacy_megatron.names import qkv_to_megatron

sys.path.insert(0, str(Path(__file__).parents[2] / "golden" / "megatron_arguments"))
from namespaces import NEOX  # noqa: E402

VOCABULARY = 56
BLOOM = model_config(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=4,
    seq_length=12,
    max_position_embeddings=12,
    position_embedding_type="alibi",
    embed_layernorm=True,
    unpadded_vocab_size=VOCABULARY,
    padded_vocab_size=VOCABULARY,
)
LLAMA = with_flags(
    BLOOM,
    num_query_groups=2,
    position_embedding_type="rope",
    embed_layernorm=False,
    normalization="RMSNorm",
    swiglu=True,
    glu_activation="swiglu",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
PYTHIA = with_flags(
    BLOOM,
    position_embedding_type="rope",
    rotary_percent=0.5,
    embed_layernorm=False,
    parallel_residual=True,
    untie_embeddings_and_output_weights=True,
)
INNER = {
    "attention_norm": "input_layernorm",
    "attention.qkv": "self_attention.query_key_value",
    "attention.proj": "self_attention.dense",
    "mlp_norm": "post_attention_layernorm",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}
PLACES = {
    "bloom": {
        "embedding.word_embeddings.": "tied_modules.embed.word_embeddings.",
        "embedding.norm.": "tied_modules.embed.word_embeddings.norm.",
        "first": 3,
        "final_norm.norm.": "6.",
    },
    "llama": {
        "embedding.word_embeddings.": "1.word_embeddings.",
        "first": 3,
        "final_norm.norm.": "6.",
        "output_layer.": "7.lm_head.",
    },
    "neox": {
        "embedding.word_embeddings.": "0.word_embeddings.",
        "first": 2,
        "final_norm.norm.": "5.norm.",
        "output_layer.": "6.final_linear.",
    },
}


def wholes(model):
    """Random canonical tensors by ``(name, kind)``."""
    generator = torch.Generator().manual_seed(3)
    return {
        (name, kind): torch.randn(shard.canonical_shape, generator=generator)
        for name, shard in whole_shards(model).items()
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    }


def their_name(name, style):
    places = PLACES[style]
    if name.startswith("layers."):
        _, number, rest = name.split(".", 2)
        module, _, kind = rest.rpartition(".")
        inner = INNER[module]
        if style == "neox":
            inner = inner.replace("self_attention", "attention")
        return f"{int(number) + places['first']}.{inner}.{kind}"
    for ours in sorted((key for key in places if key != "first"), key=len, reverse=True):
        if name.startswith(ours):
            return places[ours] + name.removeprefix(ours)
    raise AssertionError(name)


def their_rows(name, whole, model):
    if ".attention.qkv." not in name:
        return whole
    heads, groups = model.attention.num_attention_heads, model.attention.num_query_groups
    return qkv_to_megatron(whole, 3, heads, groups, model.attention.kv_channels)


def share(name, kind, whole, rank, size, style):
    """Return the cut of Megatron's layers."""
    if "qkv" in name or "word_embeddings" in name or "output_layer" in name:
        return whole.chunk(size)[rank]
    if "mlp.up" in name:
        if whole.shape[0] == 128:  # gated: each rank has rows of both
            return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
        return whole.chunk(size)[rank]
    if "proj.weight" in name or "down.weight" in name:
        return whole.chunk(size, 1)[rank]
    if style == "neox" and kind == "weight" and name.endswith((".proj.bias", ".down.bias")):
        return whole * (0.25 if rank == 0 else 0.75)
    return whole


def write_folder(folder, model, style, tensors, states, tensor=2, pipeline=2, data=2, zero=True):
    """An engine's folder with layer files and bf16 ZeRO-1 shards, as DeepSpeed writes them."""
    folder.mkdir(parents=True)
    names = list(whole_shards(model))
    theirs = {name: their_name(name, style) for name in names}
    stage_of = {name: pipeline * at // len(names) for at, name in enumerate(names)}
    for rank in range(tensor):
        layers = collections.defaultdict(dict)
        for name in names:
            values = their_rows(name, tensors[name, "weight"], model)
            part = share(name, "weight", values, rank, tensor, style)
            place, rest = theirs[name].split(".", 1)
            if place == "tied_modules":
                place, rest = "1", rest.removeprefix("embed.")
            layers[int(place)][rest] = part.to(torch.bfloat16)
            layers[int(place)] |= (
                {"attention.rotary_emb.inv_freq": torch.ones(1)} if "qkv" in name else {}
            )
        for place, content in layers.items():
            torch.save(content, folder / f"layer_{place:02d}-model_{rank:02d}-model_states.pt")
        for stage in range(pipeline):
            held = [name for name in names if stage_of[name] == stage]
            flats, shapes = {}, collections.OrderedDict()
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                parts = []
                for name in held:
                    values = their_rows(name, tensors[name, kind], model)
                    part = share(name, kind, values, rank, tensor, style)
                    shapes[theirs[name]] = part.shape
                    parts.append(part.reshape(-1))
                flat = torch.cat(parts)
                flats[kind] = torch.cat([flat, torch.zeros(-len(flat) % data)])
            number = stage * tensor + rank
            torch.save(
                {"module": None, "param_shapes": [shapes], **states},
                folder / f"mp_rank_{number:02d}_model_states.pt",
            )
            if not zero:
                continue
            size = len(flats["weight"]) // data
            for data_rank in range(data):
                mapping, offset = collections.OrderedDict(), 0
                for name, shape in shapes.items():
                    start = max(0, data_rank * size - offset)
                    end = min(shape.numel(), (data_rank + 1) * size - offset)
                    if start < end:
                        begin = offset + start - data_rank * size
                        mapping[name] = fragment_address(end - start, begin)
                    offset += shape.numel()
                own = {k: v[data_rank * size : (data_rank + 1) * size] for k, v in flats.items()}
                content = {
                    "base_optimizer_state": {
                        "state": {0: {k: own[k] for k in ("exp_avg", "exp_avg_sq")} | {"step": 7}},
                        "param_groups": [{"lr": 1e-4}],
                    },
                    "single_partition_of_fp32_groups": [own["weight"]],
                    "param_slice_mappings": [mapping],
                }
                torch.save(
                    {"optimizer_state_dict": content},
                    folder / f"bf16_zero_pp_rank_{data_rank}_mp_rank_{number:02d}_optim_states.pt",
                )


@pytest.fixture
def their_classes(monkeypatch):
    """Classes that their pickles name, under the modules that they name."""
    enums = types.ModuleType("megatron.enums")

    class PositionEmbeddingType(enum.Enum):
        rotary = 1
        absolute = 2
        alibi = 3

    PositionEmbeddingType.__module__ = "megatron.enums"
    PositionEmbeddingType.__qualname__ = "PositionEmbeddingType"
    enums.PositionEmbeddingType = PositionEmbeddingType
    monkeypatch.setitem(sys.modules, enums.__name__, enums)
    return PositionEmbeddingType


def bloom_states(positions):
    args = argparse.Namespace(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        seq_length=12,
        max_position_embeddings=12,
        position_embedding_type=positions,
        embed_layernorm=True,
        padded_vocab_size=VOCABULARY,
        bias_gelu_fusion=True,
        glu_activation=None,
        layernorm_epsilon=1e-5,
        consumed_train_samples=70,
        ffn_hidden_size=64,
    )
    return {"args": args, "iteration": 7, "checkpoint_version": 3.0, "global_steps": 7}


def llama_states():
    args = argparse.Namespace(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        seq_length=12,
        max_position_embeddings=12,
        use_rotary_position_embeddings=True,
        rope_theta=500000,
        normalization="rmsnorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=VOCABULARY,
        layernorm_epsilon=1e-5,
        consumed_train_samples=70,
        ffn_hidden_size=64,
    )
    return {"args": args, "iteration": 7}


def neox_states():
    return {"args": {"padded_vocab_size": VOCABULARY, "num_layers": 2}, "iteration": 7}


NEOX_YAML = """{
  "num-layers": 2, "hidden-size": 16, "num-attention-heads": 4, "seq-length": 12,
  "max-position-embeddings": 12, "pos-emb": "rotary", "rotary-pct": 0.5, "norm": "layernorm",
  "no-weight-tying": true, "gpt-j-residual": true, "output-layer-parallelism": "column",
  "bias-gelu-fusion": true, "attention-config": [[["flash"], 2]],
}"""


def check(source, tensors, exactly=True):
    for (name, kind), values in tensors.items():
        actual = source.tensor(name, kind)
        if exactly:
            assert torch.equal(actual, values), (name, kind)
        else:
            torch.testing.assert_close(actual, values, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(1, 1, 1), (2, 2, 3), (4, 1, 2)])
def test_bloom(tmp_path, their_classes, tensor, pipeline, data):
    tensors = wholes(BLOOM)
    states = bloom_states(their_classes.alibi)
    folder = tmp_path / "global_step7"
    write_folder(folder, BLOOM, "bloom", tensors, states, tensor, pipeline, data)
    (tmp_path / "latest").write_text("global_step7")
    source = DeepSpeedFolder(DeepSpeedFolder.locate(tmp_path, None))
    assert (
        source.model.positions.position_embedding_type == "alibi"
        and source.model.norm.embed_layernorm
    )
    assert source.state["optimizer_step"] == 7 and source.state["consumed_samples"] == 70
    check(source, tensors)


def test_megatron_deepspeed_llama(tmp_path, their_classes):
    tensors = wholes(LLAMA)
    write_folder(tmp_path / "a", LLAMA, "llama", tensors, llama_states())
    source = DeepSpeedFolder(tmp_path / "a")
    assert source.model.attention.num_query_groups == 2 and source.model.mlp.activation == "swiglu"
    assert source.model.positions.rotary_base == 500000
    check(source, tensors)
    states = llama_states()
    for size in (7, 4096):  # the default for its vision models, and the windows of a fork
        states["args"].window_size = size
        write_folder(tmp_path / str(size), LLAMA, "llama", tensors, states)
    DeepSpeedFolder(tmp_path / "7")
    with pytest.raises(CheckpointError, match=r"window_size is 4096, expected \(N, 0\)"):
        DeepSpeedFolder(tmp_path / "4096")


def test_neox(tmp_path, their_classes):
    """Its ranks have addends of the biases behind row-parallel products."""
    tensors = wholes(PYTHIA)
    folder = tmp_path / "global_step7"
    write_folder(folder, PYTHIA, "neox", tensors, neox_states())
    (folder / "configs").mkdir()
    (folder / "configs" / "pythia.yml").write_text(NEOX_YAML)
    source = DeepSpeedFolder(folder)
    assert source.model.parallel_residual and source.model.positions.rotary_percent == 0.5
    assert not source.model.shared_parallel_norm
    check(source, tensors, exactly=False)


def neox_folder(folder, text=NEOX_YAML, states=None, **sizes):
    tensors = wholes(PYTHIA)
    write_folder(folder, PYTHIA, "neox", tensors, states or neox_states(), **sizes)
    (folder / "configs").mkdir()
    (folder / "configs" / "pythia.yml").write_text(text)
    return tensors


def test_all_settings_of_neox_are_known():
    """Arguments without an effect on the network, and of features that are not used."""
    names = ["2.mlp.dense_4h_to_h.weight", "2.mlp.dense_4h_to_h.bias", "2.attention.dense.bias"]
    tensors = neox.StoredTensors(lambda: names, lambda name: 64 * 16)
    states = neox_states()["args"]
    model = neox.model_of(NEOX, states, Path("a"), tensors)
    assert model == neox.model_of(
        {name: NEOX[name] for name in (
            "num_layers", "hidden_size", "num_attention_heads", "seq_length", "pos_emb",
            "rotary_pct", "no_weight_tying", "gpt_j_residual", "bias_gelu_fusion",
        )}, states, Path("a"), tensors,
    )  # fmt: skip
    for name in ("my_setting", "attention_scale", "logits_factor"):
        with pytest.raises(CheckpointError, match=f"the effect of {name} = 2 .* is not known"):
            neox.model_of(NEOX | {name: 2}, states, Path("a"), tensors)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('"use_qk_layernorm": true', "use_qk_layernorm True"),
        ('"sliding_window_width": 8', "sliding_window_width 8"),
        ('"num_unique_layers": 1', "num_unique_layers 1"),
        ('"opt_pos_emb_offset": 2', "opt_pos_emb_offset 2"),
        ('"use_bias_in_norms": false', "use_bias_in_norms false"),
        ('"norm": "scalenorm"', "norm 'scalenorm', which cannot be represented"),
        ('"pos_emb": "sinusoidal"', "pos_emb 'sinusoidal'"),
        ('"activation": "geglu"', "activation 'geglu' with mlp_type 'regular'"),
        ('"activation": "silu"', "activation 'silu' with mlp_type 'regular'"),
        ('"activation": "swiglu"', "activation 'swiglu' with mlp_type 'regular'"),
        ('"soft_prompt_tuning": {"enabled": true}', "soft_prompt_tuning is enabled"),
        ('"output_layer_parallelism": "row", "model-parallel-size": 2', "parallelism 'row' over 2"),
        ('"use_mup": true', "use_mup True"),
        ('"attention-config": [[["local"], 2]]', "attention 'local'"),
        ('"num_layers": 4', "of another run: num_layers is 4 there and 2 in the model states"),
        ('"rotary_emb_base": "x"', "rotary_emb_base is 'x', expected a number"),
        ('"gpt_j_residual": "no"', "gpt_j_residual is 'no', expected true or false"),
        ('"no_weight_tying": false', "6.final_linear.weight is not one of the network"),
    ],
)
def test_settings_of_neox_that_change_the_network(setting, message, tmp_path):
    text = NEOX_YAML.replace("-", "_").replace("}", f"{setting.replace('-', '_')}}}")
    neox_folder(tmp_path / "a", text, zero=False)
    with pytest.raises(CheckpointError, match=message):
        DeepSpeedFolder(tmp_path / "a")


def test_neox_with_one_norm_of_two(tmp_path):
    """It stores both."""
    tensors = neox_folder(tmp_path / "a", NEOX_YAML.replace("}", '"gpt-j-tied": true}'))
    source = DeepSpeedFolder(tmp_path / "a")
    assert source.model.shared_parallel_norm
    computed = {key: values for key, values in tensors.items() if "mlp_norm" not in key[0]}
    assert {name for name, _ in computed} == set(source.names())
    check(source, computed, exactly=False)


def test_neox_without_biases_in_parallel_mlps_is_refused():
    """Its layers return the MLP's output without that of attention then."""
    tensors = neox.StoredTensors(lambda: ["2.mlp.linear1.weight"], lambda name: 64 * 16)
    settings = {**NEOX, "activation": "swiglu"}
    assert settings["gpt_j_residual"]
    with pytest.raises(CheckpointError, match="gpt_j_residual and MLPs without biases"):
        neox.model_of(settings, neox_states()["args"], Path("a"), tensors)


def test_settings_of_neox_that_contradict_each_other_are_refused(tmp_path):
    folder = tmp_path / "a"
    neox_folder(folder, zero=False)
    other = folder / "configs" / "sizes.yml"
    other.write_text('{"rotary_pct": 0.5, "train-iters": 5}')
    DeepSpeedFolder(folder)
    other.write_text('{"rotary_pct": 0.25}')
    with pytest.raises(CheckpointError, match=r"sizes.yml: rotary_pct is 0.25, but 0.5 in another"):
        DeepSpeedFolder(folder)


def test_neox_without_a_pipeline(tmp_path):
    """Its modules are in one file, and their names start with sequential."""
    folder, states = tmp_path / "a", neox_states()
    tensors = neox_folder(folder, tensor=1, pipeline=1, zero=False)
    module = {}
    for path in sorted(folder.glob("layer_*")):
        place = int(path.name[6:8])
        content = torch.load(path)
        module |= {f"sequential.{place}.{name}": values for name, values in content.items()}
        path.unlink()
    torch.save({"module": module} | states, folder / "mp_rank_00_model_states.pt")
    source = DeepSpeedFolder(folder)
    for name in source.names():
        expected = tensors[name, "weight"]
        factor = 0.25 if name.endswith((".proj.bias", ".down.bias")) else 1  # the first addend
        expected = (expected * factor).to(torch.bfloat16).float()
        assert torch.equal(source.tensor(name), expected), name


def test_joined_parts_of_neox_are_refused(tmp_path):
    folder = tmp_path / "global_step7_universal"
    for (name, kind), values in wholes(PYTHIA).items():
        place = folder / "zero" / their_name(name, "neox")
        place.mkdir(parents=True, exist_ok=True)
        values = their_rows(name, values, PYTHIA)
        torch.save({"param": values}, place / f"{'fp32' if kind == 'weight' else kind}.pt")
    torch.save(neox_states(), folder / "mp_rank_00_model_states.pt")
    (folder / "configs").mkdir()
    settings = folder / "configs" / "a.yml"
    settings.write_text(NEOX_YAML)
    check(UniversalFolder(folder), wholes(PYTHIA))
    settings.write_text(NEOX_YAML.replace("{", '{"model-parallel-size": 2,'))
    with pytest.raises(CheckpointError, match="the parts of 2 tensor ranks .* were joined"):
        UniversalFolder(folder)


def test_weights_alone_come_from_the_layer_files(tmp_path, their_classes):
    tensors = wholes(BLOOM)
    states = bloom_states(their_classes.alibi)
    write_folder(tmp_path / "a", BLOOM, "bloom", tensors, states, zero=False)
    source = DeepSpeedFolder(tmp_path / "a")
    assert source.state == {}
    for (name, kind), values in tensors.items():
        if kind == "weight":
            assert torch.equal(source.tensor(name), values.to(torch.bfloat16).float()), name
            assert source.kinds(name) == ["weight"]


def test_universal_of_megatron_deepspeed(tmp_path, their_classes):
    tensors = wholes(LLAMA)
    folder = tmp_path / "global_step7_universal"
    for (name, kind), values in tensors.items():
        place = folder / "zero" / their_name(name, "llama")
        place.mkdir(parents=True, exist_ok=True)
        content = {"param": their_rows(name, values, LLAMA), "cat_dim": 0}
        torch.save(content, place / f"{'fp32' if kind == 'weight' else kind}.pt")
        torch.save(torch.tensor(7.0), place / "step.pt")
    torch.save(llama_states(), folder / "mp_rank_00_model_states.pt")
    source = UniversalFolder(UniversalFolder.locate(tmp_path, "7"))
    assert source.state["optimizer_step"] == 7
    assert source.model.positions.rotary_base == 500000
    check(source, tensors)


def change(path, change_it):
    """Saves a pickle again, changed."""
    content = torch.load(path, weights_only=False)
    change_it(content)
    torch.save(content, path)


def saying_its_size(folder, key, size):
    """Has a folder's files say the data-parallel size, as DeepSpeed's do."""
    if key == "partition_count":
        for path in folder.glob("*optim_states.pt"):
            change(path, lambda content: content["optimizer_state_dict"].update({key: size}))
    else:
        for path in folder.glob("mp_rank_*_model_states.pt"):
            change(path, lambda content: content.update({key: size}))


@pytest.mark.parametrize(
    ("key", "size"), [("partition_count", [3]), ("partition_count", 3), ("dp_world_size", 3)]
)
@pytest.mark.parametrize("data_rank", [0, 1, 2])
def test_the_missing_file_of_a_data_rank_is_named(tmp_path, their_classes, key, size, data_rank):
    """The last one too, although its absence leaves no gap."""
    folder, states = tmp_path / "a", bloom_states(their_classes.alibi)
    write_folder(folder, BLOOM, "bloom", wholes(BLOOM), states, tensor=1, pipeline=2, data=3)
    saying_its_size(folder, key, size)
    DeepSpeedFolder(folder)
    missing = f"bf16_zero_pp_rank_{data_rank}_mp_rank_01_optim_states.pt"
    (folder / missing).unlink()
    with pytest.raises(CheckpointError, match=rf"has no {missing}, .* data rank {data_rank} of 3"):
        DeepSpeedFolder(folder)


def test_optimizer_files_of_another_save_are_named(tmp_path, their_classes):
    """DeepSpeed writes over a folder of the same tag, and more data ranks' files stay there."""
    folder, states = tmp_path / "a", bloom_states(their_classes.alibi)
    write_folder(folder, BLOOM, "bloom", wholes(BLOOM), states, tensor=1, pipeline=1, data=3)
    saying_its_size(folder, "partition_count", [2])
    with pytest.raises(CheckpointError, match="zero_pp_rank_2_mp_rank_00.*2 data ranks"):
        DeepSpeedFolder(folder)


@pytest.mark.parametrize("where", ["module", "layers"])
def test_half_precision_never_replaces_what_zero_files_lack(tmp_path, their_classes, where):
    """A parameter that lies wholly in a file that is not there: 16 bits of each of its weights
    would be lost without a word. A frozen one has only the module's copy."""
    folder, states = tmp_path / "a", bloom_states(their_classes.alibi)
    tensors = wholes(BLOOM)
    write_folder(folder, BLOOM, "bloom", tensors, states, tensor=1, pipeline=1)
    name, halves = "final_norm.norm.weight", torch.zeros(16, dtype=torch.bfloat16)
    theirs = their_name(name, "bloom")
    model_file = folder / "mp_rank_00_model_states.pt"
    if where == "module":
        for path in folder.glob("layer_*"):
            path.unlink()
        change(model_file, lambda content: content.update(module={theirs: halves}))
    assert torch.equal(DeepSpeedFolder(folder).tensor(name), tensors[name, "weight"])
    for path in folder.glob("*optim_states.pt"):
        change(
            path,
            lambda content: content["optimizer_state_dict"]["param_slice_mappings"][0].pop(
                theirs, None
            ),
        )
    with pytest.raises(CheckpointError, match=rf"{theirs} is in none of the ZeRO files"):
        DeepSpeedFolder(folder).tensor(name)
    change(model_file, lambda content: content["param_shapes"][0].pop(theirs))
    expected = halves if where == "module" else tensors[name, "weight"].to(torch.bfloat16)
    assert torch.equal(DeepSpeedFolder(folder).tensor(name), expected.float())


def test_what_cannot_be_read_is_named(tmp_path, their_classes):
    tensors = wholes(BLOOM)
    states = bloom_states(their_classes.alibi)
    write_folder(tmp_path / "a", BLOOM, "bloom", tensors, {"iteration": 7})
    with pytest.raises(CheckpointError, match="does not describe the network"):
        DeepSpeedFolder(tmp_path / "a")
    write_folder(tmp_path / "b", PYTHIA, "neox", wholes(PYTHIA), neox_states())
    with pytest.raises(CheckpointError, match="configs"):
        DeepSpeedFolder(tmp_path / "b")
    states["args"].num_layers = 3
    write_folder(tmp_path / "c", BLOOM, "bloom", tensors, states)
    with pytest.raises(CheckpointError, match=r"nothing for layers\.2"):
        DeepSpeedFolder(tmp_path / "c")
    states["args"].num_layers = 2
    write_folder(tmp_path / "d", BLOOM, "bloom", tensors, states)
    (tmp_path / "d" / "bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="data rank 0"):
        DeepSpeedFolder(tmp_path / "d")
    path = tmp_path / "c" / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states"):
        DeepSpeedFolder(tmp_path / "c")
