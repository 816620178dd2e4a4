"""Folders of other trainers, each of one small Llama as its program describes the files, against
that Llama; ZeRO's against DeepSpeed's own zero_to_fp32."""

import json
import re
import warnings

import pytest
import torch
import yaml
from fuzz.readers import trainers
from fuzz.readers.checkpoints import CONFIG, weights, write_huggingface
from safetensors.torch import load_file, save_file

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.formats.conversion.commands import export_hf, import_hf

MAKERS = {
    "sharded checkpoint (DCP)": trainers.write_titan,
    "model of litgpt": trainers.write_litgpt,
    "checkpoint of nanotron": trainers.write_nanotron,
    "checkpoint of OLMo-core": trainers.write_olmo_core,
    "checkpoint of transformers' Trainer with DeepSpeed": trainers.write_zero,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    write_huggingface(folder)
    return open_checkpoint(folder)


def require_same(source, llama):
    assert list(source.names()) == list(llama.names())
    for name in llama.names():
        assert torch.equal(source.tensor(name), llama.tensor(name)), name
    assert source.model.shaping() == llama.model.shaping()
    assert source.model.norm == llama.model.norm
    assert source.model.positions.rotary_base == llama.model.positions.rotary_base


STATES = {
    "sharded checkpoint (DCP)": (10, 0), "checkpoint of OLMo-core": (7, 0),
    "checkpoint of transformers' Trainer with DeepSpeed": (9, 72),
}  # fmt: skip
"""Iteration and samples of folders with moments."""


def require_moments(source, llama, counters):
    """The moments of a weight w are w / 2 and w squared."""
    if counters is None:
        kinds = {kind for name in source.names() for kind in source.kinds(name)}
        assert source.state == {} and kinds == {"weight"}
        return
    iteration, samples = counters
    assert source.state == {
        "iteration": iteration, "consumed_samples": samples, "optimizer_step": 7,
        "loss_scaler": {},
    }  # fmt: skip
    for name in llama.names():
        weight = llama.tensor(name)
        assert torch.equal(source.tensor(name, "exp_avg"), weight / 2), name
        assert torch.equal(source.tensor(name, "exp_avg_sq"), weight**2), name


@pytest.mark.parametrize("title", MAKERS)
def test_the_folder_is_the_llama(title, llama, tmp_path):
    MAKERS[title](tmp_path)
    source = open_checkpoint(tmp_path)
    assert source.title == title
    require_same(source, llama)
    require_moments(source, llama, STATES.get(title))
    source.copy_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "hf").mkdir()
    assert "agree" in export_hf(source, tmp_path / "hf", 10**9)
    require_same(open_checkpoint(tmp_path / "hf"), llama)
    with pytest.raises(
        CheckpointError, match=rf"--input .*: a {re.escape(title)}, which --load of"
    ):
        import_hf(tmp_path, tmp_path / "out", "--input", "--output")


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 3])
def test_zero_shards_are_what_zero_to_fp32_makes_of_them(stage, ranks, llama, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    trainers.write_zero(tmp_path, stage, ranks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path), "global_step5")
    for name, values in weights().items():
        assert torch.equal(theirs[name], values)
    source = open_checkpoint(tmp_path)
    require_same(source, llama)
    require_moments(source, llama, (9, 72))
    assert any("schedule is at step 8, and its run at 9" in note for note in source.notes)


def test_float32_shards_are_read_next_to_16_bit_weights(llama, tmp_path):
    trainers.write_zero(tmp_path)
    half = {name: values.bfloat16() for name, values in weights().items()}
    save_file(half, tmp_path / "model.safetensors", {"format": "pt"})
    require_same(open_checkpoint(tmp_path), llama)
    require_same(open_checkpoint(tmp_path / "global_step5"), llama)


def edit_yaml(path, change):
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


def of_nanotron(folder):
    return next(folder.rglob("mlp/down_proj/*tp-rank-1*"))


def missing_rank(folder):
    of_nanotron(folder).unlink()


def truncated(folder):
    path = of_nanotron(folder)
    path.write_bytes(path.read_bytes()[:-9])


def lying_place(folder):
    path = of_nanotron(folder)
    place = "None,None,None|0,12,None#None,None,None|0,6,None"
    facts = {
        "version": "1.4", "unsharded_shape": "(16, 24)", "local_global_slices_pairs": place,
    }  # fmt: skip
    save_file(load_file(path), path, facts)


def wrong_shape(folder):
    edit_yaml(folder / "config.yaml", lambda c: c["model"]["model_config"].update(vocab_size=31))


def unknown_setting(folder):
    edit_yaml(folder / "config.yaml", lambda c: c["model"]["model_config"].update(experts=8))


NANOTRON = {
    missing_rank: r"down_proj has no file of tensor rank 1",
    truncated: r"down_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors",
    lying_place: r"tp-rank-1-of-2.safetensors: its part does not fit",
    wrong_shape: r"token_embedding/.*: model.embed_tokens.weight has the shape \(32, 16\)",
    unknown_setting: r"config.yaml: experts is 8, which cannot be represented",
}


@pytest.mark.parametrize("damage", NANOTRON, ids=lambda damage: damage.__name__)
def test_nanotrons_damage_is_refused_by_file(damage, tmp_path):
    trainers.write_nanotron(tmp_path)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=NANOTRON[damage]):
        open_checkpoint(tmp_path).check_tensors()


def test_litgpt_refuses_what_it_cannot_represent(tmp_path):
    trainers.write_litgpt(tmp_path)
    path = tmp_path / "model_config.yaml"
    edit_yaml(path, lambda content: content.update(scale_embeddings=True))
    with pytest.raises(CheckpointError, match=r"model_config.yaml: scale_embeddings is True"):
        open_checkpoint(tmp_path)
    edit_yaml(
        path, lambda content: content.update(scale_embeddings=False, mlp_class_name="GemmaMLP")
    )
    with pytest.raises(CheckpointError, match="norm_class_name and mlp_class_name"):
        open_checkpoint(tmp_path)


def test_zero_without_a_rank_is_refused(tmp_path):
    trainers.write_zero(tmp_path)
    next(tmp_path.rglob("zero_pp_rank_1*optim_states.pt")).unlink()
    with pytest.raises(CheckpointError, match="optimizer states of data rank 1"):
        open_checkpoint(tmp_path)


MALFORMED = {
    "names": (2, lambda s: s["param_slice_mappings"][0].update({7: None}), "is malformed"),
    "groups": (3, lambda s: s.update(fp32_flat_groups=[]), "float32 weights of group 0"),
    "counts": (2, lambda s: s.update(partition_count=["two"]), r"global_step5: .* is malformed"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_zero_states_are_refused_by_file(case, tmp_path):
    stage, change, message = MALFORMED[case]
    trainers.write_zero(tmp_path, stage)
    path = next(tmp_path.rglob("zero_pp_rank_0*optim_states.pt"))
    content = torch.load(path, weights_only=False)
    change(content["optimizer_state_dict"])
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path).check_tensors()


def test_reordered_norms_of_olmo_core_are_those_of_olmo2(tmp_path):
    """Against a folder of transformers' Olmo2ForCausalLM, whose table has its tests."""
    (tmp_path / "step9").mkdir()
    trainers.write_olmo_core(tmp_path / "step9", reordered=True)
    config = {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file(trainers.olmo2_weights(), tmp_path / "model.safetensors", {"format": "pt"})
    require_same(open_checkpoint(tmp_path / "step9"), open_checkpoint(tmp_path))


SETTINGS = {
    "rope": ("block", "attention", "rope", "name", "complex"),
    "half": ("block", "attention", "rope", "partial_rotary_factor", 0.5),
    "heads": ("block", "attention", "use_head_qk_norm", True),
    "activation": ("block", "feed_forward", "activation", "gelu"),
    "bias": ("block", "attention", "bias", True),
    "tie": ("tie_word_embeddings", True),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_olmo_core_refuses_a_setting_that_it_lacks(case, tmp_path):
    trainers.write_olmo_core(tmp_path)
    *places, name, value = SETTINGS[case]
    content = json.loads((tmp_path / "config.json").read_text())
    part = content["model"]
    for each in places:
        part = part[each]
    part[name] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"config.json: {name} is {value!r}, which cannot"):
        open_checkpoint(tmp_path)


def test_olmo_core_refuses_another_block(tmp_path):
    trainers.write_olmo_core(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    content["model"]["block"]["name"] = "peri_norm"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"config.json: model.block.name is 'peri_norm'"):
        open_checkpoint(tmp_path)


def test_moments_of_accelerate_are_in_their_own_folder(llama, tmp_path):
    trainers.write_fsdp(tmp_path)
    torch.save({"last_epoch": 9}, tmp_path / "scheduler.pt")
    source = open_checkpoint(tmp_path)
    require_same(source, llama)
    require_moments(source, llama, (9, 0))
    assert source.notes == (
        "it does not say how many samples it has seen: data begin with the first",
    )


def numbered(state):
    return {str(n): each for n, each in enumerate(state.values())}


def without_a_norm(state):
    return {name: each for name, each in state.items() if name != "model.norm.weight"}


def with_largest(state):
    return {name: {**each, "max_exp_avg_sq": each["exp_avg_sq"]} for name, each in state.items()}


def of_two_steps(state):
    return {**state, "model.norm.weight": {**state["model.norm.weight"], "step": torch.tensor(3.0)}}


def of_another(state):
    return {**state, "model.other": state["model.norm.weight"]}


LEFT_OUT = {
    numbered: "its optimizer numbers the weights",
    without_a_norm: "no exp_avg of model.norm.weight is stored",
    with_largest: "its optimizer has max_exp_avg_sq, which is not Adam's state",
    of_two_steps: "its weights have 2 numbers of Adam's steps",
    of_another: "its optimizer has exp_avg of model.other, which is no weight",
}


@pytest.mark.parametrize("change", LEFT_OUT, ids=lambda change: change.__name__)
def test_states_that_are_not_adams_of_every_weight_are_named(change, llama, tmp_path):
    state = {"state": change(trainers.moments(weights()))}
    trainers.save_dcp(tmp_path, {"model": weights(), "optim": state})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    source = open_checkpoint(tmp_path)
    require_same(source, llama)
    require_moments(source, llama, None)
    assert len(source.notes) == 1 and source.notes[0].startswith("weights only: ")
    assert LEFT_OUT[change] in source.notes[0]


def test_moments_of_another_shape_are_refused(tmp_path):
    state = trainers.moments(weights())
    state["model.norm.weight"]["exp_avg"] = torch.zeros(3)
    trainers.save_dcp(tmp_path, {"model": weights(), "optim": {"state": state}})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"exp_avg of model.norm.weight has the shape \(3,\)"):
        open_checkpoint(tmp_path)
