"""Checkpoints of other trainers give the logits of their programs' formulas, and every plausible
wrong reading of one is noticed by that: a converter is never compared with itself alone."""

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from gpt_forward import forward
from megatron_formula import LENGTH, VOCABULARY, WIDTH, Formula, logits, weights

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.source import open_checkpoint
from megatron.formats import meta
from megatron.formats.deepspeed_folders import naming, neox
from megatron.formats.huggingface import architecture
from megatron.formats.inspection import model_of
from megatron.formats.legacy_megatron import arguments, reader

sys.path.insert(0, str(Path(__file__).parents[1] / "golden" / "meta_llama"))
import meta_files  # noqa: E402

LLAMA = Formula(
    groups=4, base=500000.0, epsilon=1e-2, rms="inside", gate="first", biases=None, qkv_bias=False,
    tied=False,
)  # fmt: skip
CASES = {
    "megatron 0": Formula(order="heads", positions="learned", activation="erf", epsilon=1e-2),
    "megatron 1": Formula(order="channels", positions="learned"),
    "megatron 3": dataclasses.replace(
        LLAMA, percent=0.5, qkv_bias=True, scale=4.0, inner=80, window=3
    ),
    "megatron-deepspeed": LLAMA,
    "bloom": Formula(positions="alibi", embedding_norm=True),
    "neox": Formula(
        base=500000.0, percent=0.5, activation="erf", parallel=True, biases="addends", tied=False,
        epsilon=1e-2,
    ),
    "neox sequential": Formula(drifted=True, tied=False, percent=0.25, heads=4, groups=4),
    "neox grouped": Formula(
        order="thirds", groups=4, epsilon=1e-8, table=0.05, rms="outside", gate="last", tied=False,
    ),
    "neox llama": Formula(
        order="shares", groups=4, epsilon=1e-8, table=0.05, rms="outside", gate="apart",
        biases=None, qkv_bias=False, tied=False, inner=80,
    ),
}  # fmt: skip
TOKENS = torch.arange(LENGTH) * 7 % VOCABULARY


def common(formula):
    """Arguments that Megatron-LM and Megatron-DeepSpeed have."""
    return {
        "num_layers": formula.layers,
        "hidden_size": WIDTH,
        "num_attention_heads": formula.heads,
        "ffn_hidden_size": formula.inner,
        "seq_length": LENGTH,
        "max_position_embeddings": LENGTH,
        "layernorm_epsilon": formula.epsilon,
        "padded_vocab_size": VOCABULARY,
        "unpadded_vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": 1,
        "add_bias_linear": formula.biases is not None,
        "untie_embeddings_and_output_weights": not formula.tied,
        "swiglu": formula.gate is not None,
        "bias_gelu_fusion": formula.activation == "tanh",
        "normalization": "RMSNorm" if formula.rms else "LayerNorm",
        "tensor_model_parallel_size": formula.ranks,
        "pipeline_model_parallel_size": 1,
    }


BLOCK = {
    "norm1": "input_layernorm", "norm2": "post_attention_layernorm", "qkv": "query_key_value",
    "proj": "dense", "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h",
}  # fmt: skip


def renamed(block, names, attention):
    stored = {}
    for name, values in block.items():
        module, kind = name.split(".")
        prefix = f"{attention}." if module in ("qkv", "proj") else ""
        stored[f"{prefix}{names[module]}.{kind}"] = values
    return stored


def write_megatron(folder, formula, stored, version):
    rope = formula.positions == "rope"
    args = common(formula) | {
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "group_query_attention": formula.groups != formula.heads,
        "num_query_groups": formula.groups,
        "rotary_base": int(formula.base),
        "rotary_percent": formula.percent,
        "rotary_seq_len_interpolation_factor": int(formula.scale) if formula.scale > 1 else None,
        "add_qkv_bias": formula.qkv_bias and not formula.biases,
        "window_size": None if formula.window is None else (formula.window, 0),
    }
    for rank, outer in enumerate(stored.outer):
        encoder = {f"final_layernorm.{k}": outer[f"final.{k}"] for k in norm_kinds(formula)}
        for n, ranks in enumerate(stored.blocks):
            block = renamed(ranks[rank], BLOCK, "self_attention")
            encoder |= {f"layers.{n}.{name}": values for name, values in block.items()}
        embedding = {"word_embeddings": {"weight": outer["embedding.weight"]}}
        if "positions.weight" in outer:
            embedding["position_embeddings"] = {"weight": outer["positions.weight"]}
        language = {"embedding": embedding, "encoder": encoder}
        if not formula.tied:
            language["output_layer"] = {"weight": outer["head.weight"]}
        content = {
            "args": argparse.Namespace(**args), "checkpoint_version": float(version),
            "iteration": 1, "model": {"language_model": language},
        }  # fmt: skip
        place = folder / "iter_0000001" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        torch.save(content, place / "model_optim_rng.pt")


def norm_kinds(formula):
    return ("weight",) if formula.rms else ("weight", "bias")


def write_layers(folder, states, layers):
    """Layer files of an engine's folder: by place, a dictionary for each tensor rank."""
    folder.mkdir(parents=True)
    for place, ranks in layers.items():
        for rank, content in enumerate(ranks):
            torch.save(content, folder / f"layer_{place:02d}-model_{rank:02d}-model_states.pt")
            torch.save({"module": None} | states, folder / f"mp_rank_{rank:02d}_model_states.pt")


def write_megatron_deepspeed(folder, formula, stored, bloom):
    args = common(formula)
    if bloom:
        args |= {"position_embedding_type": "alibi", "embed_layernorm": True}
    else:
        args |= {
            "use_rotary_position_embeddings": True, "add_position_embedding": False,
            "rope_theta": int(formula.base), "num_key_value_heads": formula.groups,
            "normalization": "rmsnorm",
        }  # fmt: skip
    last = formula.layers + 4
    layers = {1: [], last: [], last + 1: []}
    for outer in stored.outer:
        table = {"word_embeddings.weight": outer["embedding.weight"]}
        if bloom:
            table |= {f"word_embeddings.norm.{k}": outer[f"embedding_norm.{k}"]
                      for k in norm_kinds(formula)}  # fmt: skip
        layers[1].append(table)
        layers[last].append({k: outer[f"final.{k}"] for k in norm_kinds(formula)})
        if not formula.tied:
            layers[last + 1].append({"lm_head.weight": outer["head.weight"]})
    for n, ranks in enumerate(stored.blocks):
        layers[3 + n] = [renamed(block, BLOCK, "self_attention") for block in ranks]
    write_layers(folder, {"args": argparse.Namespace(**args), "iteration": 1}, layers)


def write_neox(folder, formula, stored):
    settings = {
        "num-layers": formula.layers, "hidden_size": WIDTH, "num-attention-heads": formula.heads,
        "seq-length": LENGTH, "max-position-embeddings": LENGTH, "pos-emb": "rotary",
        "rotary-pct": formula.percent, "rotary-emb-base": int(formula.base),
        "norm": "rmsnorm" if formula.rms else "layernorm", "no-weight-tying": True,
        "gpt-j-residual": formula.parallel, "bias-gelu-fusion": formula.activation == "tanh",
        "rms_norm_epsilon" if formula.rms else "layernorm-epsilon": formula.epsilon,
        "model-parallel-size": formula.ranks, "train-iters": 10,
        "intermediate_size": 3 * formula.inner,
    }  # fmt: skip
    names = dict(BLOCK)
    if formula.groups != formula.heads:
        settings["num_kv_heads"] = formula.groups
    if formula.gate == "last":
        names |= {"up": "mlp.linear1", "down": "mlp.linear2"}
        settings["activation"] = "swiglu"
    elif formula.gate == "apart":
        names |= {"gate": "mlp.w1", "up": "mlp.w3", "down": "mlp.w2"}
        settings |= {"activation": "silu", "mlp_type": "llama"}
    scale = {"weight": "scale"} if formula.rms else {}
    layers = {0: [], formula.layers + 3: [], formula.layers + 4: []}
    for outer in stored.outer:
        layers[0].append({"word_embeddings.weight": outer["embedding.weight"]})
        final = {f"norm.{scale.get(k, k)}": outer[f"final.{k}"] for k in norm_kinds(formula)}
        layers[formula.layers + 3].append(final)
        layers[formula.layers + 4].append({"final_linear.weight": outer["head.weight"]})
    for n, ranks in enumerate(stored.blocks):
        layers[2 + n] = []
        for block in ranks:
            theirs = renamed(block, names, "attention")
            layers[2 + n].append({
                name.replace("norm.weight", f"norm.{scale.get('weight', 'weight')}"): values
                for name, values in theirs.items()
            })  # fmt: skip
    write_layers(folder, {"args": {"padded_vocab_size": VOCABULARY}, "iteration": 1}, layers)
    (folder / "configs").mkdir()
    (folder / "configs" / "a.yml").write_text(json.dumps(settings))


def write(case, folder):
    """Writes the files of a case; returns what to compare with: tokens and their logits."""
    if case == "meta":
        cases = json.loads((Path(meta_files.__file__).parent / "golden.json").read_text())["cases"]
        meta_files.write("llama3", folder)
        return meta_files.tokens()[1], torch.tensor(cases["llama3"]["logits"])
    formula = CASES[case]
    stored = weights(formula)
    program, _, version = case.partition(" ")
    if program == "megatron":
        write_megatron(folder, formula, stored, version)
    elif program == "neox":
        write_neox(folder, formula, stored)
    else:
        write_megatron_deepspeed(folder, formula, stored, program == "bloom")
    return TOKENS, logits(formula, stored, TOKENS)


def difference(folder, tokens, expected):
    """The largest difference of the logits of what is read in a folder."""
    source = open_checkpoint(folder)
    model = model_of(source, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        stored = forward(model, tokens[None], model=source.model)[0, :, : expected.shape[1]]
    assert expected.std() > 0.3
    return float((stored - expected).abs().max())


@pytest.mark.parametrize("case", [*CASES, "meta"])
def test_logits_of_the_programs_formula(case, tmp_path):
    assert difference(tmp_path / "a", *write(case, tmp_path / "a")) < 3e-5


def flags(module, **changes):
    """A reader that takes other values than the file's for some flags of the network."""

    def plant(monkeypatch):
        real = module.resolved
        monkeypatch.setattr(
            module, "resolved", lambda f, where: real(dataclasses.replace(f, **changes), where)
        )

    return plant


def replaced(owner, name, wrong):
    """A reader with another function; ``wrong`` makes it from the right one."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))


@pytest.mark.parametrize("case", ["neox grouped", "neox llama"])
def test_shared_keys_in_a_universal_folder(case, tmp_path):
    """A folder that DeepSpeed's ds_to_universal has made of one tensor rank; parameters are flat at
    ZeRO stage 3."""
    formula = dataclasses.replace(CASES[case], ranks=1)
    stored = weights(formula)
    write_neox(tmp_path / "a", formula, stored)
    folder = tmp_path / "global_step1_universal"
    for path in (tmp_path / "a").glob("layer_*"):
        for name, values in torch.load(path).items():
            place = folder / "zero" / f"{int(path.name[6:8])}.{name}"
            place.mkdir(parents=True)
            torch.save({"param": values.flatten()}, place / "fp32.pt")
    for name in ("mp_rank_00_model_states.pt", "configs"):
        (tmp_path / "a" / name).rename(folder / name)
    assert difference(folder, TOKENS, logits(formula, stored, TOKENS)) < 3e-5


def in_order(version):
    """Rows of queries, keys and values in the order of another version."""
    return lambda real: lambda values, _, *sizes: real(values, version, *sizes)


def swapped_heads(real):
    """Keys of the first group for the second, and the other way round."""

    def wrong(values, version, heads, groups, width):
        stored = real(values, version, heads, groups, width)
        q, kv = stored.split([heads * width, 2 * groups * width])
        return torch.cat([q, *(part for k in kv.chunk(2) for part in k.chunk(groups)[::-1])])

    return wrong


def gate_last(real):
    """The second half of a gated MLP as its gate."""

    def wrong(self, name, *rest):
        stored = real(self, name, *rest)
        return torch.cat(stored.chunk(2)[::-1]) if ".mlp.up." in name else stored

    return wrong


def first_rank(_):
    return lambda self, name, kind, ranks: ranks[0]


def sum_of_biases(_):
    return lambda self, name, kind, ranks: (
        sum(ranks) if name.endswith((".proj.bias", ".down.bias")) else ranks[0]
    )


def no_heads(_):
    return lambda self, theirs: 0


PLANTS = {
    ("megatron 0", "version 1"): replaced(reader, "qkv_from_megatron", in_order(1)),
    ("megatron 0", "GELU by tanh"): flags(arguments, bias_gelu_fusion=True),
    ("megatron 0", "usual epsilon"): flags(arguments, norm_epsilon=1e-5),
    ("megatron 1", "version 0"): replaced(reader, "qkv_from_megatron", in_order(0)),
    ("megatron 1", "version 2"): replaced(reader, "qkv_from_megatron", in_order(2)),
    ("megatron 1", "exact GELU"): flags(arguments, bias_gelu_fusion=False),
    ("megatron 3", "usual base"): flags(arguments, rotary_base=10000.0),
    ("megatron 3", "whole heads rotated"): flags(arguments, rotary_percent=1.0),
    ("megatron 3", "positions not scaled"): flags(arguments, rope_scaling=None),
    ("megatron 3", "usual epsilon"): flags(arguments, norm_epsilon=1e-5),
    ("megatron 3", "window of one more"): flags(arguments, sliding_window=5),
    ("megatron 3", "no window"): flags(arguments, sliding_window=None),
    ("megatron 3", "keys of other heads"): replaced(reader, "qkv_from_megatron", swapped_heads),
    ("megatron 3", "thirds"): replaced(reader, "qkv_from_megatron", lambda _: lambda v, *_: v),
    ("megatron 3", "gate last"): replaced(reader.MegatronCheckpoint, "tensor", gate_last),
    ("megatron-deepspeed", "usual base"): flags(arguments, rotary_base=10000.0),
    ("megatron-deepspeed", "usual epsilon"): flags(arguments, norm_epsilon=1e-5),
    ("megatron-deepspeed", "thirds"): replaced(
        naming, "qkv_from_megatron", lambda _: lambda v, *_: v
    ),
    ("megatron-deepspeed", "keys of other heads"): replaced(
        naming, "qkv_from_megatron", swapped_heads
    ),
    ("megatron-deepspeed", "gate last"): replaced(naming.ForeignNaming, "join", gate_last),
    ("bloom", "no positions"): flags(arguments, position_embedding_type="none"),
    ("bloom", "biases times ranks"): replaced(naming.ForeignNaming, "replicated", sum_of_biases),
    ("bloom", "version 0"): replaced(naming, "qkv_from_megatron", in_order(0)),
    ("neox", "usual base"): flags(neox, rotary_base=10000.0),
    ("neox", "whole heads rotated"): flags(neox, rotary_percent=1.0),
    ("neox", "one block after the other"): flags(neox, parallel_residual=False),
    ("neox", "GELU by tanh"): flags(neox, bias_gelu_fusion=True),
    ("neox", "biases of one rank"): replaced(neox.NeoXNaming, "replicated", first_rank),
    ("neox", "usual epsilon"): flags(neox, norm_epsilon=1e-5),
    ("neox sequential", "biases times ranks"): replaced(
        neox.NeoXNaming, "replicated", sum_of_biases
    ),
    ("neox sequential", "norms of one rank"): replaced(neox.NeoXNaming, "replicated", first_rank),
    ("neox sequential", "parallel"): flags(neox, parallel_residual=True),
    ("neox sequential", "exact GELU"): flags(neox, bias_gelu_fusion=False),
    ("neox grouped", "Megatron's groups"): replaced(
        neox.NeoXNaming, "_in_thirds", lambda _: lambda self, name: False
    ),
    ("neox grouped", "gate first"): replaced(
        neox.NeoXNaming, "whole", lambda _: naming.Naming.whole
    ),
    ("neox grouped", "LayerNorm's epsilon"): flags(neox, norm_epsilon=1e-5),
    ("neox grouped", "keys of each head"): replaced(
        neox.NeoXNaming, "_per_head", lambda _: lambda self: True
    ),
    ("neox llama", "thirds"): replaced(neox.NeoXNaming, "_per_head", lambda _: lambda self: False),
    ("neox llama", "gate last"): replaced(neox.NeoXNaming, "join", gate_last),
    ("neox llama", "usual epsilon"): flags(neox, norm_epsilon=1e-5),
    ("neox llama", "another width"): flags(neox, ffn_hidden_size=64),
    ("meta", "usual base"): flags(architecture, rotary_base=10000.0),
    ("meta", "usual epsilon"): flags(architecture, norm_epsilon=1e-1),
    ("meta", "pairs not reordered"): replaced(meta.MetaFolder, "_rotated_heads", no_heads),
}
"""Wrong readings by case."""


@pytest.mark.parametrize(("case", "reading"), PLANTS)
def test_a_wrong_reading_is_noticed(case, reading, tmp_path, monkeypatch):
    expected = write(case, tmp_path / "a")
    PLANTS[case, reading](monkeypatch)
    with contextlib.suppress(CheckpointError):
        assert difference(tmp_path / "a", *expected) > 3e-4


def test_every_converter_has_wrong_readings():
    assert {case for case, _ in PLANTS} == {*CASES, "meta"}
