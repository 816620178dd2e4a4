"""Folders of peft: theirs load here with equal outputs, and ours there."""

import json
import resource
import signal
from types import SimpleNamespace

import pytest
import torch
from hf_cases import CASES as DENSE_CASES
from hf_expert_cases import EXPERT_CASES
from hf_inputs import pair
from hf_more_cases import MORE_CASES
from safetensors.torch import load_file, save_file
from samples import sampled

from megatron.apps.generation.execution.adapters import served_adapters
from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import locate_checkpoint, open_checkpoint
from megatron.config import ConfigError
from megatron.features.adapters import peft as folders
from megatron.features.adapters.flags import AdapterConfig
from megatron.features.adapters.model import additions_of
from megatron.features.adapters.peft import PeftFolder, target_modules, write_adapters, write_peft
from megatron.formats.conversion.output import write_checkpoint
from megatron.formats.inspection import model_of
from megatron.run.run import parse_run

peft = pytest.importorskip("peft", reason="the folders are peft's")


CASES = DENSE_CASES | EXPERT_CASES | MORE_CASES


def is_parameter(target):
    """True for the matrices of experts, of which transformers has one parameter."""
    return "experts." in target


MODELS = {
    ("gpt2", "tied"): ["attn.c_attn", "mlp.c_proj"],
    ("llama", "kv_heads=2,untied"): ["q_proj", "v_proj", "gate_proj", "o_proj"],
    ("phi3", "kv_heads=2,untied"): ["qkv_proj", "gate_up_proj"],
    ("gemma2", "caps"): ["k_proj", "up_proj", "down_proj"],
    ("gpt_neox", "untied"): ["query_key_value", "dense"],
    ("falcon", "40b"): ["query_key_value"],
    ("qwen3", "kv_heads=2,untied"): ["q_proj", "k_proj", "v_proj"],
    ("bloom", "tied"): ["query_key_value", "dense_4h_to_h"],
    ("mixtral", "plain"): ["q_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ("qwen2_moe", "dense_first"): [
        "v_proj", "gate_proj", "shared_expert_gate", "mlp.experts.down_proj",
    ],
    ("granitemoe", "plain"): ["block_sparse_moe.experts.gate_up_proj"],
    ("gpt_oss", "plain"): ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "k_proj"],
}  # fmt: skip
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {r"0\..*": 5}, "alpha_pattern": {r"1\..*": 3}},
}
CASES_OF_KINDS = [
    (model, kind)
    for model, targets in MODELS.items()
    for kind in KINDS
    if kind != "dora" or not any(map(is_parameter, targets))  # peft refuses that
]
FEW = {
    (("gpt2", "tied"), "lora"), (("llama", "kv_heads=2,untied"), "dora"),
    (("llama", "kv_heads=2,untied"), "patterns"), (("phi3", "kv_heads=2,untied"), "rslora"),
    (("gemma2", "caps"), "lora"), (("mixtral", "plain"), "rslora"),
}  # fmt: skip


@pytest.fixture
def adapted(hf_model, tmp_path):
    """Makes a base and a model of peft on it with random adapters, each in a folder of its own;
    returns the model and the folders."""

    def make(model, targets, **settings):
        model_type, case = model
        base, folder = tmp_path / "base", tmp_path / "adapters"
        theirs = hf_model(model_type, **CASES[model_type][case])
        theirs.save_pretrained(base)
        theirs.name_or_path = theirs.config._name_or_path = str(base)
        modules, parameters = targets, None
        if not isinstance(targets, str):
            modules = [target for target in targets if not is_parameter(target)]
            parameters = [target for target in targets if is_parameter(target)] or None
        config = peft.LoraConfig(
            r=3, lora_alpha=7, target_modules=modules, target_parameters=parameters,
            task_type="CAUSAL_LM", fan_in_fan_out=model_type == "gpt2", **settings,
        )  # fmt: skip
        actual = peft.get_peft_model(theirs, config).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, param in actual.named_parameters():
                if "lora_" in name:
                    values = torch.randn(param.shape, generator=generator) * 0.1
                    param.copy_(values + 2.0 if "magnitude" in name else values)
                elif "modules_to_save" in name:
                    param += 0.1 * torch.randn(param.shape, generator=generator)
        actual.save_pretrained(folder)
        return actual, base, folder

    return make


def require_equal_logits(source, theirs):
    """The merged model of a source computes what theirs does."""
    model = model_of(source, torch.float32, torch.device("cpu"))
    inputs = pair(source.model, 20)
    with torch.no_grad():
        ours, expected = model(inputs.ours), inputs.loss(theirs(**inputs.theirs))
    torch.testing.assert_close(sum(ours.losses.values()), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("model", "kind"), sampled(CASES_OF_KINDS, lambda case: case in FEW), ids=str
)
def test_theirs_load_here(adapted, model, kind):
    theirs, base, folder = adapted(model, MODELS[model], **KINDS[kind])
    source = open_checkpoint(folder)
    assert isinstance(source, PeftFolder)
    assert source.base.folder == base
    require_equal_logits(source, theirs)


@pytest.mark.parametrize(
    ("model", "dora"),
    sampled(
        [(model, kind == "dora") for model, kind in CASES_OF_KINDS if kind in ("lora", "dora")],
        lambda case: (
            case
            in (
                (("gpt2", "tied"), False),
                (("llama", "kv_heads=2,untied"), True),
                (("gpt_oss", "plain"), False),
            )
        ),
    ),
)
def test_ours_load_there(adapted, hf_model, tmp_path, model, dora):
    """Written again, they name the same modules, and peft computes the same with them."""
    theirs, base, folder = adapted(model, MODELS[model], use_dora=dora, use_rslora=True)
    again = tmp_path / "again"
    again.mkdir()
    count = write_adapters(open_checkpoint(folder), again)
    before, after = (load_file(place / "adapter_model.safetensors") for place in (folder, again))
    assert len(after) == count
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert torch.equal(after[name], values), name
    loaded = peft.PeftModel.from_pretrained(
        hf_model(model[0], **CASES[model[0]][model[1]]), again
    ).eval()
    config = loaded.peft_config["default"]
    expected = theirs.peft_config["default"]
    for key in ("r", "lora_alpha", "use_dora", "use_rslora", "fan_in_fan_out"):
        assert getattr(config, key) == getattr(expected, key)
    assert config.base_model_name_or_path == str(base)
    inputs = pair(open_checkpoint(base).model, 20)
    with torch.no_grad():
        same = inputs.loss(loaded(**inputs.theirs)), inputs.loss(theirs(**inputs.theirs))
    assert torch.equal(*same)
    trained = {name for name, _ in loaded.named_modules() if name.endswith("lora_A.default")}
    assert trained == {n for n, _ in theirs.named_modules() if n.endswith("lora_A.default")}


def test_merging_does_not_change_the_base(adapted):
    """Its file may be mapped into memory, so that each reading has the same tensor."""
    _, base, folder = adapted(("llama", "kv_heads=2,untied"), ["o_proj"])
    file, name = base / "model.safetensors", "layers.0.attention.proj.weight"
    torch.save(load_file(file), base / "pytorch_model.bin")
    file.unlink()
    source = open_checkpoint(folder)
    first = source.tensor(name).clone()
    assert torch.equal(source.tensor(name), first)
    assert not torch.equal(source.base.tensor(name), first)


def test_additions_to_experts_are_not_served_next_to_their_base(adapted):
    """They would be left out; a merged model has them."""
    _, base, folder = adapted(("mixtral", "plain"), ["q_proj", "mlp.experts.down_proj"])
    engine = SimpleNamespace(device=torch.device("cpu"), names={}, model=torch.nn.Module())
    with pytest.raises(ConfigError, match=r"additions to experts \(layers\.0\.mlp\.experts\.down"):
        served_adapters(engine, {"legal": str(folder)}, base)


def test_ranks_and_alphas_that_differ_are_written(adapted, hf_model, tmp_path):
    model, again = ("llama", "kv_heads=2,untied"), tmp_path / "again"
    theirs, _, folder = adapted(model, MODELS[model], **KINDS["patterns"])
    again.mkdir()
    write_adapters(open_checkpoint(folder), again)
    loaded = peft.PeftModel.from_pretrained(hf_model("llama", **CASES["llama"][model[1]]), again)
    inputs = pair(open_checkpoint(again).model, 20)
    with torch.no_grad():
        same = inputs.loss(loaded.eval()(**inputs.theirs)), inputs.loss(theirs(**inputs.theirs))
    assert torch.equal(*same)
    require_equal_logits(open_checkpoint(again), theirs)


def test_targets_of_a_run_are_those_of_its_base(hf_folder):
    """A Phi-3 fits the flags of a Llama, whose matrices have other names."""
    base = hf_folder("phi3", "base", **CASES["phi3"]["kv_heads=2,untied"])
    flags = "--lora --lora-targets qkv_proj --use-checkpoint-args --tokenizer-type NullTokenizer"
    run = parse_run(
        None,
        [*flags.split(), *"--vocab-size 63 --micro-batch-size 1 --seq-length 16".split(),
         *"--train-iters 1 --lr 1e-3 --data-path no".split(), "--pretrained-checkpoint", str(base)],
    )  # fmt: skip
    actual = additions_of(run.config.model, run.config.section(AdapterConfig).lora_targets)
    assert {name: [each.parts for each in actual[name]] for name in actual} == {
        "layers.{n}.attention.qkv": [()]
    }


def test_a_full_disk_is_an_error_of_the_file(adapted, tmp_path):
    _, _, folder = adapted(("llama", "kv_heads=2,untied"), ["o_proj"])
    source, limits = open_checkpoint(folder), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
        with pytest.raises(OSError, match=r"adapter_model.safetensors cannot be written"):
            write_peft(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_pattern_of_targets_is_shown_as_names(adapted):
    _, _, folder = adapted(("llama", "kv_heads=2,untied"), r".*\.(q|down)_proj")
    assert open_checkpoint(folder).adapters.lora_targets == ("down_proj", "q_proj")


@pytest.mark.parametrize("lost", ["lora_A", "lora_B", "lora_magnitude_vector"])
def test_an_incomplete_adapter_is_named(adapted, lost):
    _, _, folder = adapted(("llama", "kv_heads=2,untied"), ["o_proj"], use_dora=True)
    file = folder / "adapter_model.safetensors"
    save_file({name: v for name, v in load_file(file).items() if f"0.self_attn.o_proj.{lost}"
               not in name}, file)  # fmt: skip
    with pytest.raises(CheckpointError, match=r"layers.0.attention.proj.weight has .*must have"):
        open_checkpoint(folder).tensor("layers.0.attention.proj.weight")


def test_merged_is_what_peft_merges(adapted, tmp_path):
    model = ("llama", "kv_heads=2,untied")
    theirs, base, folder = adapted(model, MODELS[model], use_dora=True, modules_to_save=["lm_head"])
    source = open_checkpoint(folder)
    require_equal_logits(source, theirs)
    native = open_checkpoint(write_checkpoint(tmp_path / "native", source))
    theirs.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = open_checkpoint(tmp_path / "merged")
    for name in merged.names():
        torch.testing.assert_close(native.tensor(name), merged.tensor(name), rtol=1e-6, atol=1e-7)
    assert not torch.equal(
        source.tensor("output_layer.weight"), source.base.tensor("output_layer.weight")
    )


def test_reading_twice_gives_the_same(adapted):
    _, _, folder = adapted(("llama", "kv_heads=2,untied"), ["o_proj"])
    source, name = open_checkpoint(folder), "layers.1.attention.proj.weight"
    assert torch.equal(source.tensor(name).clone(), source.tensor(name))


REFUSED = {
    "kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
    "biases": ({"bias": "all"}, "biases of the base were trained"),
    "init": ({"init_lora_weights": "pissa_niter_4"}, "changes the base too"),
    "base": ({"base_model_name_or_path": "meta-llama/L"}, "not there: name its place by --pre"),
    "file": (
        {"base_model_name_or_path": __file__},
        "test_peft.py is not a folder: name the base by",
    ),
    "rank": ({"r": "8"}, "expected numbers"),
    "alphas": ({"alpha_pattern": 3}, "alpha_pattern is 3; expected numbers by patterns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(adapted, case):
    changes, words = REFUSED[case]
    _, _, folder = adapted(("llama", "kv_heads=2,untied"), ["o_proj"])
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(folder)


def test_an_unknown_tensor_is_named(adapted):
    _, _, folder = adapted(("llama", "kv_heads=2,untied"), ["o_proj"])
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.vision.lora_A.weight": torch.ones(3, 3)}, file)
    with pytest.raises(CheckpointError, match=r"vision.lora_A.weight is of no linear layer"):
        open_checkpoint(folder)


def test_adapters_of_another_base_do_not_fit(adapted, hf_folder):
    _, _, folder = adapted(("llama", "kv_heads=2,untied"), ["o_proj"])
    other = hf_folder("llama", "other", **CASES["llama"]["kv_heads=2,untied"] | {"hidden_size": 64})
    source = locate_checkpoint(folder)._replace(base=str(other)).open()
    with pytest.raises(CheckpointError, match="does not fit a weight"):
        source.tensor("layers.0.attention.proj.weight")


def test_endings_are_the_shortest_that_are_clear(hf_folder):
    model = open_checkpoint(hf_folder("gpt2", **CASES["gpt2"]["tied"])).model
    modules = [f"transformer.h.{n}.attn.c_proj" for n in range(2)]
    assert target_modules(modules, model) == ["attn.c_proj"]
    both = [*modules, *(f"transformer.h.{n}.mlp.c_proj" for n in range(2))]
    assert target_modules(both, model) == ["c_proj"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [(r"((\w|[a-z]|\.)+)+[0-9!]", "takes longer"), ("(", "not a regular expr")],
)
def test_patterns_of_others_are_bounded(pattern, message, tmp_path):
    module = "model.layers.0.self_attn.q_proj.and_a_name_that_is_rather_long_for_a_module"
    with pytest.raises(CheckpointError, match=f"adapter_config.json: alpha_pattern .*{message}"):
        folders._matches(pattern, module, tmp_path / "adapter_config.json")
    assert folders._matches(r"q_proj|v_proj", "model.layers.0.self_attn.q_proj", tmp_path)
    assert not folders._matches(r"q_proj", "model.layers.0.self_attn.k_proj", tmp_path)
