"""Every table against transformers, both ways: its weights give its logits in our model, what is
written again is what was read, and gradients are the same."""

import dataclasses

import pytest
import torch
from hf_cases import CASES
from hf_classic_cases import CLASSIC_CASES
from hf_encoder_cases import ENCODER_CASES, ENCODER_GRADIENTS
from hf_expert_cases import EXPERT_CASES
from hf_hybrid_cases import HYBRID_CASES
from hf_inputs import VOCABULARY, pair
from hf_latent_cases import LATENT_CASES
from hf_modern_cases import MODERN
from hf_more_cases import LLAMA4_CASES, MORE_CASES
from safetensors.torch import load_file
from samples import sampled
from transformers import AutoConfig

from megatron.families import build_model
from megatron.formats.huggingface import architecture_named, architectures
from megatron.formats.huggingface.entries import (
    GATE_AND_UP,
    GROUPED_QKV,
    SAME,
    SEPARATE_KV,
    SEPARATE_QKV,
    TRANSPOSED,
    Reordering,
)
from megatron.formats.huggingface.export import write_model
from megatron.formats.huggingface.source import HuggingFaceFolder
from megatron.parallel.shard import shard_of

CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}
GEMMA_CLOSE = {"rtol": 1.3e-6, "atol": 3e-5}
DELTA_CLOSE = {"rtol": 1.3e-6, "atol": 5e-5}
"""Both are up to 3e-5 away from float64, where they differ by less than 1e-10
(tests/features/recurrent/test_delta_layer.py)."""
LENGTH = 40
"""Longer than the sliding windows and than the length before a stretching in the cases."""
SHORT = 12
"""Shorter than the length before a stretching."""


def close(model_type):
    if model_type.startswith(("qwen3_next", "qwen3_5")):
        return DELTA_CLOSE
    return GEMMA_CLOSE if model_type.startswith("gemma") else CLOSE


def ours_of(source):
    """Our model with the weights of a source."""
    model = build_model(source.model).eval()
    with torch.no_grad():
        for name, param in model.canonical_parameters():
            param.copy_(shard_of(param).cut(source.tensor(name)))
        for name, buffer in model.canonical_buffers():
            buffer.values.copy_(source.tensor(name))
    return model


@torch.no_grad()
def assert_same_logits(source, theirs, model_type):
    """All outputs, at all positions that are not padding."""
    ours, task = ours_of(source), source.architecture.task_of(source.model)
    for length in (LENGTH, SHORT):
        inputs = pair(source.model, length)
        state, output = ours(inputs.ours.changed(targets=None)), theirs(**inputs.theirs)
        for name, actual in task.outputs(state, source.model).items():
            expected, counted = output[name], inputs.counted
            if counted is not None and actual.ndim > 2:
                actual, expected = actual[counted], expected[counted]
            torch.testing.assert_close(actual, expected, **close(model_type))


# What the two versions of transformers spell differently or derive, or what says nothing.
NOISE = {"_name_or_path", "transformers_version", "architectures", "dtype", "use_cache",
         "original_max_position_embeddings", "sliding_window_pattern", "rope_local_base_freq",
         "rotary_emb_base", "rotary_pct", "partial_rotary_factor", "rope_theta", "rope_scaling",
         "head_dim", "seq_length", "max_window_layers", "_sliding_window_pattern",
         "n_positions", "rotary_dim", "num_nextn_predict_layers", "num_mtp_layers",
         "mtp_num_hidden_layers",
         "embedding_initializer_range", "interleave_moe_layer_step",
         "no_rope_layer_interval", "attention_types", "global_attn_every_n_layers",
         "global_rope_theta", "local_rope_theta"}  # fmt: skip
SAME_ACTIVATION = {"gelu_fast": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}


def meaning(folder):
    """Return the configuration that transformers reads in a config.json."""
    content = AutoConfig.from_pretrained(folder).to_dict()
    content = {key: value for key, value in content.items() if key not in NOISE}
    if "mlp_layer_types" in content:  # what older readers take instead
        content.pop("first_k_dense_replace", None)
    for name in ("bos_token_id", "pad_token_id"):
        if content.get(name) is None:
            content.pop(name, None)  # a T5 has no first token, a CodeGen none for padding
    if "sliding_attention" not in content.get("layer_types", ["sliding_attention"]):
        for name in ("sliding_window", "local_attention"):
            content.pop(name, None)
    (content.get("rope_parameters") or {}).pop("type", None)
    return {
        key: SAME_ACTIVATION.get(value, value) if isinstance(value, str) else value
        for key, value in content.items()
    }


EXPERT_CASES = EXPERT_CASES | MORE_CASES | LATENT_CASES | HYBRID_CASES | LLAMA4_CASES
EXPERT_CASES |= CLASSIC_CASES
CASES = CASES | EXPERT_CASES | ENCODER_CASES
CASES |= {name: {"plain": case} for name, case in MODERN.items()}
ALL_CASES = [(model_type, case) for model_type, cases in CASES.items() for case in cases]


ONE_WAY = [
    (model_type, next(iter(CASES[model_type])))
    for model_type in (*CLASSIC_CASES, *ENCODER_CASES, *MODERN)
]
"""Cases that are only read by default: what is written is compared with what was read."""


def is_sampled(case):
    """The first case of each architecture with experts runs by default; numbers of key
    heads are Llama's, and the heads of a Megatron BERT are those of BERT."""
    model_type, name = case
    first = name == next(iter(CASES[model_type]))
    if first or model_type in EXPERT_CASES | ENCODER_CASES or model_type == "megatron-bert":
        return first
    return model_type == "llama" or name not in ("kv_heads=4,tied", "kv_heads=2,untied")


FIRST_ALONE = {
    "gpt2", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_neox", "opt",
    "falcon", "bloom", "bert", "t5",
}  # fmt: skip
OTHERS = {
    ("gpt2", "untied"), ("gpt2", "one_head"), ("qwen2", "pattern"), ("phi3", "partial_longrope"),
    ("mistral", "window"), ("gemma2", "caps"), ("gemma3_text", "scaled"),
    ("gemma3_text", "irregular"), ("gpt_neox", "sequential"), ("opt", "no_biases"),
    ("falcon", "40b"), ("falcon", "each_head"), ("falcon", "7b,biases"), ("bloom", "six_heads"),
    ("bert", "masked_lm,untied"), ("bert", "labels"), ("bert", "choices"), ("bert", "span"),
    ("t5", "1.1"),
}  # fmt: skip
"""Cases by default, next to the first, of architectures that have many: each has entries of the
table, or a mechanism, of its own."""


def is_read(case):
    """True if a case runs by default: see ``OTHERS``."""
    model_type, name = case
    first = name == next(iter(CASES[model_type]))
    return is_sampled(case) and (first or model_type not in FIRST_ALONE or case in OTHERS)


@pytest.mark.parametrize(("model_type", "case"), sampled(ALL_CASES, is_read))
def test_against_hf(model_type, case, hf_model, tmp_path):
    theirs, folder, back = hf_model(model_type, **CASES[model_type][case]), *(
        tmp_path / name for name in ("theirs", "back")
    )  # fmt: skip
    theirs.save_pretrained(folder)
    source = HuggingFaceFolder(folder)
    assert source.model.vocabulary.size == VOCABULARY
    assert_same_logits(source, theirs, model_type)

    back.mkdir()
    write_model(source, back, "float32", 10**9)
    actual, expected = (load_file(path / "model.safetensors") for path in (back, folder))
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert meaning(back) == meaning(folder)
    assert HuggingFaceFolder(back).model == source.model
    if (model_type, case) not in ONE_WAY:
        assert_read_by_hf(back, source, theirs)


def assert_read_by_hf(folder, source, theirs):
    """A folder that was written is complete to transformers, and has the source's logits there."""
    attention = "eager" if source.model.attention.attn_logit_softcapping else None
    again, report = type(theirs).from_pretrained(
        folder, attn_implementation=attention, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same_logits(source, again.eval(), source.architecture.model_type)


@pytest.mark.proof
@pytest.mark.parametrize(("model_type", "case"), ONE_WAY)
def test_what_is_written_against_hf(model_type, case, hf_model, tmp_path):
    theirs = hf_model(model_type, **CASES[model_type][case])
    theirs.save_pretrained(tmp_path / "theirs")
    source = HuggingFaceFolder(tmp_path / "theirs")
    (tmp_path / "back").mkdir()
    write_model(source, tmp_path / "back", "float32", 10**9)
    assert_read_by_hf(tmp_path / "back", source, theirs)


GRADIENTS = [
    ("gpt2", "untied"), ("llama", "llama3"), ("llama", "attention_biases"), ("mistral", "window"),
    ("qwen2", "window"),
    ("qwen3", "kv_heads=2,untied"), ("phi3", "partial_longrope"), ("gemma2", "caps"),
    ("gemma3_text", "scaled"), ("gpt_neox", "untied"), ("gpt_neox", "sequential"),
    ("opt", "tied"), ("falcon", "7b"), ("falcon", "40b"), ("bloom", "tied"),
    ("t5", "1.0"), ("t5", "1.1"), ("bert", "pretraining"), ("bert", "masked_lm,relu"),
    ("megatron-bert", "pretraining"), ("megatron-bert", "masked_lm"),
    ("bert", "labels"), ("megatron-bert", "number"), ("bert", "choices"), ("megatron-bert", "span"),
    *((model_type, case) for model_type, cases in EXPERT_CASES.items() for case in cases),
    *((model_type, "plain") for model_type in MODERN),
    *ENCODER_GRADIENTS,
]  # fmt: skip


@torch.no_grad()
def gradients_of(theirs, folder):
    """The gradients of a model by the names of its parameters in files; overwrites its weights."""
    for param in theirs.parameters():
        param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    theirs.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


_SHIFTING = {
    "multiple_choice": ["classifier.bias"],
    "span": ["qa_outputs.bias", "encoder.ln.bias", "layer.2.output.LayerNorm.bias"],
}


def test_every_architecture_is_compared():
    known = {architecture.model_type for architecture in architectures()}
    assert known == {model_type for model_type, _ in ALL_CASES}
    assert known == {model_type for model_type, _ in GRADIENTS}


RELATIVES = (MODERN.keys() | CLASSIC_CASES.keys() | ENCODER_CASES.keys()) - {
    "bitnet", "apertus", "nanochat", "ministral3", "olmo", "cohere",
    "gpt_bigcode", "gpt_neo", "gptj", "mpt", "xglm", "distilbert", "roberta",
}  # fmt: skip
"""Architectures all of whose layers another one has, whose gradients are compared by default."""


@pytest.mark.parametrize(
    ("model_type", "case"),
    sampled(GRADIENTS, lambda each: is_sampled(each) and each[0] not in RELATIVES),
)
def test_gradients_against_hf(model_type, case, hf_model, tmp_path):
    theirs = hf_model(model_type, **CASES[model_type][case])
    theirs.save_pretrained(tmp_path)
    source = HuggingFaceFolder(tmp_path)
    model, inputs = ours_of(source), pair(source.model, LENGTH)
    sum(model(inputs.ours).losses.values()).backward()
    inputs.loss(theirs(**inputs.theirs)).backward()
    ours = {
        name: shard_of(param).join([param.grad]) for name, param in model.canonical_parameters()
    }
    actual = {
        name: gradient
        for parameter in source.architecture.parameters(source.model)
        if parameter.ours in ours  # the others have no gradient
        for name, gradient in parameter.to_hf(ours[parameter.ours]).items()
    }
    expected = {
        name: gradient
        for name, gradient in gradients_of(theirs, tmp_path / "gradients").items()
        if not name.endswith(("e_score_correction_bias", "layer_scalar"))
        and name not in source.architecture.constants(source.model)
    }
    assert actual.keys() == expected.keys()
    # A bias on all keys moves all scores of a query alike, and so do those below the scores of
    # choices and places.
    idle = ["k_proj.bias", "key.bias", "k_lin.bias", *_SHIFTING.get(source.model.head, ())]
    if {"num_experts_per_tok": 1, "moe_k": 1}.items() & CASES[model_type][case].items():
        idle += ["gate.weight", "router.layer.weight", "router.weight", "router.bias"]
    for name, gradient in expected.items():
        unchosen = ".experts." in name  # no token went to it
        assert gradient.abs().max() > 1e-7 or unchosen or name.endswith(tuple(idle)), name
        torch.testing.assert_close(
            actual[name], gradient, **close(model_type), msg=lambda m, n=name: f"{n}: {m}"
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


REVERSED = Reordering(
    "reversed", 1, lambda values, _: (values.flip(0),), lambda tensors, _: tensors[0].flip(0)
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
    "bert: norms of sums exchanged": (
        "bert", "pretraining", "layers.{n}.attention_norm.weight", "layers.{n}.mlp_norm.weight"),
    "bert: norm of the embeddings at the end": (
        "bert", "pretraining", "layers.{n}.attention_norm.bias", "layers.{n}.mlp_norm.bias"),
    "bert: key and value exchanged": (
        "bert", "masked_lm", "layers.{n}.attention.qkv.weight", exchanged(SEPARATE_QKV, 0, 2, 1)),
    "megatron-bert: head's norm and final norm exchanged": (
        "megatron-bert", "pretraining", "lm_head.norm.weight", "final_norm.norm.weight"),
    "megatron-bert: dense layers of the heads exchanged": (
        "megatron-bert", "pretraining", "lm_head.dense.weight", "pooler.dense.weight"),
    "bert: pooler and classifier's inputs": (
        "bert", "labels", "pooler.dense.weight", TRANSPOSED),
    "megatron-bert: start and end exchanged": (
        "megatron-bert", "span", "span_head.weight", REVERSED),
    "roberta: positions from the last to the first": (
        "roberta", "tied", "embedding.position_embeddings.weight", REVERSED),
    "distilbert: norms of sums exchanged": (
        "distilbert", "tied", "layers.{n}.attention_norm.weight", "layers.{n}.mlp_norm.weight"),
    "electra: head's norm and final norm exchanged": (
        "electra", "tied", "lm_head.norm.weight", "final_norm.norm.weight"),
    "t5: cross-attention's key and value exchanged": (
        "t5", "1.0", "decoder.layers.{n}.cross_attention.kv.weight", exchanged(SEPARATE_KV, 1, 0)),
    "t5: biases of encoder and decoder exchanged": (
        "t5", "1.0", "encoder.relative_bias.weight", "decoder.relative_bias.weight"),
    "t5: norms exchanged": (
        "t5", "1.1", "decoder.layers.{n}.cross_attention_norm.weight",
        "decoder.layers.{n}.mlp_norm.weight"),
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
        assert_same_logits(source, theirs, model_type)
