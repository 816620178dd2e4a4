"""Losses and gradients of low-rank additions against peft's, on the same weights and batch."""

import itertools

import pytest
import torch
from hf_cases import CASES
from hf_hybrid_cases import HYBRID_CASES
from hf_inputs import pair
from hf_latent_cases import LATENT_CASES
from samples import sampled

from megatron.config import ParallelConfig, RunConfig
from megatron.families import spec_of
from megatron.features.adapters.flags import AdapterConfig, is_adapter
from megatron.features.adapters.model import with_adapters
from megatron.formats.huggingface import linear_targets
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.model.layer_list import LayerStack, initialise
from megatron.parallel.shard import shard_of
from megatron.parallel.tensor_parallel import TensorParallel

peft = pytest.importorskip("peft", reason="the numbers that ours are compared with")

CASES = CASES | HYBRID_CASES | LATENT_CASES
LENGTH = 40
RANK, ALPHA = 3, 7.0
KINDS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}
MODELS = [
    ("gpt2", "tied"), ("llama", "llama3"), ("llama", "kv_heads=2,untied"),
    ("phi3", "kv_heads=2,untied"),
    ("gemma2", "caps"), ("gpt_neox", "untied"), ("falcon", "40b"), ("qwen2", "window"),
    ("qwen3", "kv_heads=2,untied"), ("mistral", "window"), ("opt", "tied"), ("bloom", "tied"),
    ("gemma3_text", "scaled"), ("t5", "1.1"), ("bert", "masked_lm"), ("qwen3_5_text", "plain"),
    ("youtu", "untied"), ("minicpm3", "longrope"),
]  # fmt: skip
FEW = {("gpt2", "tied", "lora"), ("llama", "kv_heads=2,untied", "dora"),
       ("phi3", "kv_heads=2,untied", "rslora"), ("gemma2", "caps", "lora"),
       ("gpt_neox", "untied", "dora"), ("qwen3_5_text", "plain", "lora")}  # fmt: skip
CASES_OF_KINDS = [(*model, kind) for model, kind in itertools.product(MODELS, KINDS)]


def ours_with_adapters(source, settings):
    """Our model of a source, with adapters of random values."""
    adapters = AdapterConfig(lora=True, lora_rank=RANK, lora_alpha=ALPHA, **settings)
    config = RunConfig(source.model, sections=(adapters,))
    spec = with_adapters(spec_of(source.model), config)
    model = LayerStack(spec.layers(TensorParallel()), ParallelConfig()).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, param in model.canonical_parameters():
            if is_adapter(name):
                values = torch.randn(param.shape, generator=generator) * 0.1
                param.copy_(values + 2.0 if name.endswith("magnitude") else values)
            else:
                param.copy_(shard_of(param).cut(source.tensor(name)))
    return model


def pairs_of_names(source):
    """(our name, their name without what peft puts around it, the target) of each parameter."""
    kinds = {"a": "lora_A", "b": "lora_B", "magnitude": "lora_magnitude_vector"}
    for target in linear_targets(source.model):
        stack = target.layer.partition(".{n}.")[0]
        for n in range(source.architecture.stacks[stack](source.model)):
            for kind, theirs in kinds.items():
                ours = "_".join(filter(None, ("lora", target.part, kind)))
                name = f"{target.layer}.{ours}".format(n=n)
                yield name, f"{target.module.format(n=n)}.{theirs}.default.weight", target, kind


def with_peft(theirs, source, settings):
    """Their model with peft's adapters, on every linear module of a block."""
    names = sorted({
        target.module.format(n=n)
        for target in linear_targets(source.model)
        for n in range(source.architecture.stacks[target.layer.partition(".{n}.")[0]](source.model))
    })  # fmt: skip
    config = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=names, lora_dropout=0.0, bias="none",
        fan_in_fan_out=source.architecture.model_type == "gpt2", **settings,
    )  # fmt: skip
    return peft.get_peft_model(theirs, config).eval()


def in_float64(ours, source):
    """The gradients of adapters in float64: how far float32 is from them is rounding, of which some
    of these models make much."""
    held = dict(ours.canonical_parameters())
    in_float32 = {name: param.grad for name, param in held.items()}
    ours.zero_grad()
    ours.double()
    sum(ours(pair(source.model, LENGTH).ours).losses.values()).backward()
    actual = {name: param.grad for name, param in held.items()}
    ours.zero_grad()
    ours.float()
    for name, param in held.items():
        param.grad = in_float32[name]
    return actual


@pytest.mark.parametrize(
    ("model_type", "case", "kind"), sampled(CASES_OF_KINDS, lambda case: case in FEW)
)
def test_losses_and_gradients_are_those_of_peft(model_type, case, kind, hf_model, tmp_path):
    theirs = hf_model(model_type, **CASES[model_type][case])
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    ours = ours_with_adapters(source, KINDS[kind])
    adapted = with_peft(theirs, source, KINDS[kind])
    params = dict(adapted.named_parameters())
    held, compared = dict(ours.canonical_parameters()), []
    with torch.no_grad():
        for name, module, target, part in pairs_of_names(source):
            if name in held:
                values = held[name].detach()
                their = params.pop(f"base_model.model.{module}")
                their.copy_(values if part == "a" else target.rows_to_hf(values))
                compared.append((name, their, target, part))
    assert not [name for name, param in params.items() if param.requires_grad]
    assert len(compared) == sum(param.requires_grad for param in held.values())

    inputs = pair(source.model, LENGTH)
    loss = sum(ours(inputs.ours).losses.values())
    loss.backward()
    their_loss = inputs.loss(adapted(**inputs.theirs))
    their_loss.backward()
    torch.testing.assert_close(loss, their_loss, rtol=1e-6, atol=0)
    exact = in_float64(ours, source)
    for name, their, target, part in compared:
        expected = their.grad if part == "a" else target.rows_from_hf(their.grad)
        assert expected.abs().max() > 1e-8, name
        rounding = float((held[name].grad - exact[name]).norm())
        off = float((held[name].grad - expected).norm())
        assert off <= 1e-6 * float(expected.norm()) + 3 * rounding, name
    frozen = [param for name, param in held.items() if not is_adapter(name)]
    assert all(param.grad is None and not param.requires_grad for param in frozen)


def test_initial_values_are_drawn_as_peft_draws_them(hf_model, tmp_path):
    """A between the same bounds, B zero: the model starts as its base."""
    theirs = hf_model("llama", **CASES["llama"]["kv_heads=2,untied"])
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    torch.manual_seed(1)  # for peft's
    adapted = with_peft(theirs, source, {})
    model = ours_with_adapters(source, {})
    held = dict(model.canonical_parameters())
    for name, param in held.items():
        if is_adapter(name):
            initialise(name, param, seed=7)
    for name, module, _, part in pairs_of_names(source):
        if part == "magnitude":
            continue
        expected = adapted.get_parameter(f"base_model.model.{module}")
        assert held[name].shape == expected.shape
        if part == "b":
            assert not held[name].any() and not expected.any()
        else:
            bound = expected.shape[1] ** -0.5
            for values in (held[name], expected):
                assert 0.85 * bound < values.abs().max() <= bound
                assert abs(float(values.detach().mean())) < 0.2 * bound


def test_only_what_is_named_has_additions(hf_folder):
    source = HuggingFaceFolder(hf_folder("llama", **CASES["llama"]["kv_heads=2,untied"]))
    adapters = AdapterConfig(lora=True, lora_targets=("q_proj", "self_attn.o_proj", "mlp.up"))
    spec = with_adapters(spec_of(source.model), RunConfig(source.model, sections=(adapters,)))
    model = LayerStack(spec.layers(TensorParallel()), ParallelConfig())
    actual = {name for name, param in model.canonical_parameters() if param.requires_grad}
    assert {name.removeprefix("layers.0.") for name in actual if name.startswith("layers.0.")} == {
        "attention.qkv.lora_q_a", "attention.qkv.lora_q_b",
        "attention.proj.lora_a", "attention.proj.lora_b",
        "mlp.up.lora_gate_a", "mlp.up.lora_gate_b", "mlp.up.lora_up_a", "mlp.up.lora_up_b",
    }  # fmt: skip


def test_an_unknown_target_is_refused_with_those_that_there_are(hf_folder):
    source = HuggingFaceFolder(hf_folder("gpt2", **CASES["gpt2"]["tied"]))
    adapters = AdapterConfig(lora=True, lora_targets=("c_attm",))
    with pytest.raises(ValueError, match="c_attm.*c_attn, c_proj, c_fc.*did you mean c_attn") as it:
        with_adapters(spec_of(source.model), RunConfig(source.model, sections=(adapters,)))
    assert "\n" not in str(it.value)
