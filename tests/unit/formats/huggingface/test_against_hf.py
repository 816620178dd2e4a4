"""Every table against transformers, both ways: its weights give its logits in our model, what is
written again is what was read, and gradients are the same."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from gpt_forward import forward
from hf_cases import CASES
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.families import build_model
from megatron.formats.huggingface import ARCHITECTURES, write_model
from megatron.formats.huggingface.entries import (
    GATE_AND_UP,
    GROUPED_QKV,
    SAME,
    SEPARATE_QKV,
    Reordering,
)
from megatron.formats.huggingface.registry import architecture_named
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.parallel.cross_entropy import Targets
from megatron.parallel.shard import shard_of

CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}
GEMMA_CLOSE = {"rtol": 1.3e-6, "atol": 3e-5}
LENGTH = 40
"""Longer than the sliding windows and than the length before a stretching in the cases."""
SHORT = 12
"""Shorter than the length before a stretching."""
VOCABULARY = 61


def close(model_type):
    return GEMMA_CLOSE if model_type.startswith("gemma") else CLOSE


def random_tokens(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (3, LENGTH), generator=generator)


def ours_of(source):
    """Our model with the weights of a source."""
    model = build_model(source.model).eval()
    with torch.no_grad():
        for name, param in model.canonical_parameters():
            param.copy_(shard_of(param).cut(source.tensor(name)))
    return model


@torch.no_grad()
def assert_same_logits(ours, theirs, model_type):
    for length in (LENGTH, SHORT):
        tokens = random_tokens()[:, :length]
        found, expected = forward(ours, tokens)[..., :VOCABULARY], theirs(tokens).logits
        torch.testing.assert_close(found, expected, **close(model_type))


# What the two versions of transformers spell differently or derive, or what says nothing.
NOISE = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache",
         "original_max_position_embeddings", "sliding_window_pattern", "rope_local_base_freq",
         "rotary_emb_base", "rotary_pct", "partial_rotary_factor", "rope_theta", "rope_scaling",
         "head_dim", "seq_length", "max_window_layers", "_sliding_window_pattern"}  # fmt: skip
SAME_ACTIVATION = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}


def meaning(folder):
    """What a config.json means to transformers."""
    content = AutoConfig.from_pretrained(folder).to_dict()
    content = {key: value for key, value in content.items() if key not in NOISE}
    if "sliding_attention" not in content.get("layer_types", ["sliding_attention"]):
        content.pop("sliding_window")
    (content.get("rope_parameters") or {}).pop("type", None)
    return {
        key: SAME_ACTIVATION.get(value, value) if isinstance(value, str) else value
        for key, value in content.items()
    }


ALL_CASES = [(model_type, case) for model_type, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("model_type", "case"), ALL_CASES)
def test_against_hf(model_type, case, hf_model, tmp_path):
    theirs, folder, back = hf_model(model_type, **CASES[model_type][case]), *(
        tmp_path / name for name in ("theirs", "back")
    )  # fmt: skip
    theirs.save_pretrained(folder)
    source = HuggingFaceFolder(folder)
    assert source.model.vocabulary.size == VOCABULARY
    assert_same_logits(ours_of(source), theirs, model_type)

    back.mkdir()
    write_model(source, back, "float32", 10**9)
    found, wanted = (load_file(path / "model.safetensors") for path in (back, folder))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert meaning(back) == meaning(folder)
    assert HuggingFaceFolder(back).model == source.model
    attention = "eager" if source.model.attention.attn_logit_softcapping else None
    again, report = AutoModelForCausalLM.from_pretrained(
        back, attn_implementation=attention, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same_logits(ours_of(source), again.eval(), model_type)


GRADIENTS = [
    ("gpt2", "untied"), ("llama", "llama3"), ("llama", "attention_biases"), ("mistral", "window"),
    ("qwen2", "window"),
    ("qwen3", "kv_heads=2,untied"), ("phi3", "partial_longrope"), ("gemma2", "caps"),
    ("gemma3_text", "scaled"), ("gpt_neox", "untied"), ("gpt_neox", "sequential"),
    ("opt", "tied"), ("falcon", "7b"), ("falcon", "40b"), ("bloom", "tied"),
]  # fmt: skip


def test_every_architecture_is_compared():
    known = {architecture.model_type for architecture in ARCHITECTURES}
    assert known == {model_type for model_type, _ in ALL_CASES}
    assert known == {model_type for model_type, _ in GRADIENTS}


@pytest.mark.parametrize(("model_type", "case"), GRADIENTS)
def test_gradients_against_hf(model_type, case, hf_model, tmp_path):
    theirs = hf_model(model_type, **CASES[model_type][case])
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    model, tokens, labels = ours_of(source), random_tokens(), random_tokens(2)
    forward(model, tokens, targets=Targets(labels, torch.ones(labels.shape))).backward()
    F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    ours = {
        name: shard_of(param).join([param.grad]) for name, param in model.canonical_parameters()
    }
    found = dict(source.architecture.to_hf(source.model, ours.__getitem__))
    if "embed_out.weight" in found:  # its name in files
        found["lm_head.weight"] = found.pop("embed_out.weight")
    assert found.keys() == {name for name, _ in theirs.named_parameters()}
    for name, param in theirs.named_parameters():
        # A bias on all keys moves all scores of a query alike.
        assert param.grad.abs().max() > 1e-7 or "k_proj.bias" in name, name
        torch.testing.assert_close(
            found[name], param.grad, **close(model_type), msg=lambda m, n=name: f"{n}: {m}"
        )


def exchanged(form, *order):
    """A reordering that mixes up its tensors."""
    inverse = [order.index(place) for place in range(len(order))]
    return Reordering(
        form.name,
        form.tensors,
        lambda values, model: [form.to_hf(values, model)[place] for place in order],
        lambda tensors, model: form.from_hf([tensors[place] for place in inverse], model),
    )


def renamed(entries, first, second):
    """Entries in which two parameters have changed places."""
    names = {first: second, second: first}
    return tuple(
        dataclasses.replace(entry, ours=names.get(entry.ours, entry.ours)) for entry in entries
    )


# Each is a mistake that leaves every shape as it should be, at one place of a table.
MISTAKES = {
    "gpt2: projection not transposed": (
        "gpt2", "tied", "layers.{n}.attention.proj.weight", SAME),
    "llama: key and value exchanged": (
        "llama", "kv_heads=2,untied", "layers.{n}.attention.qkv.weight",
        exchanged(SEPARATE_QKV, 0, 2, 1)),
    "llama: gate and up exchanged": (
        "llama", "kv_heads=2,untied", "layers.{n}.mlp.up.weight", exchanged(GATE_AND_UP, 1, 0)),
    "gpt_neox: not by group": ("gpt_neox", "untied", "layers.{n}.attention.qkv.weight", SAME),
    "falcon: not by group": ("falcon", "40b", "layers.{n}.attention.qkv.weight", SAME),
    "bloom: bias not by group": ("bloom", "tied", "layers.{n}.attention.qkv.bias", SAME),
    "phi3: by group": ("phi3", "kv_heads=2,untied", "layers.{n}.attention.qkv.weight",
                       GROUPED_QKV),
    "gemma2: post norms exchanged": (
        "gemma2", "window", "layers.{n}.attention_post_norm.weight",
        "layers.{n}.mlp_post_norm.weight"),
    "gemma3: q and k norm exchanged": (
        "gemma3_text", "window", "layers.{n}.attention.q_norm.weight",
        "layers.{n}.attention.k_norm.weight"),
    "opt: norms exchanged": (
        "opt", "tied", "layers.{n}.attention_norm.weight", "layers.{n}.mlp_norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_table_is_noticed(mistake, hf_model, tmp_path, monkeypatch):
    model_type, case, ours, wrong = MISTAKES[mistake]
    right = architecture_named({"model_type": model_type}, tmp_path)
    if isinstance(wrong, str):
        entries = renamed(right.entries, ours, wrong)
    else:
        entries = tuple(
            dataclasses.replace(entry, form=wrong) if entry.ours == ours else entry
            for entry in right.entries
        )
    assert entries != right.entries
    table = dataclasses.replace(right, entries=entries)
    monkeypatch.setattr("megatron.formats.huggingface.source.architecture_named", lambda *_: table)
    theirs = hf_model(model_type, **CASES[model_type][case])
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_logits(ours_of(source), theirs, model_type)
