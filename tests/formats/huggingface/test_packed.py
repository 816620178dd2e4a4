"""Folders with quantised weights: against packers and formulas written here from the formats'
descriptions, number by number, and against the packages that define them, where they are installed
(bitsandbytes, compressed-tensors, AutoAWQ, GPTQModel)."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from samples import sampled
from transformers import CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

from megatron.checkpoint.files import CheckpointError
from megatron.formats.conversion.commands import to_hf
from megatron.formats.huggingface.packed import packing_of
from megatron.formats.huggingface.packed.form import StoredParts
from megatron.formats.huggingface.packed.writing import _config, quantised
from megatron.formats.huggingface.source import HuggingFaceFolder

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40,
}  # fmt: skip
GROUP = 16


def numbers(shape, bits, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1 << bits, shape, generator=draw)


def signed(word):
    """An int32 of 32 bits."""
    return struct.unpack("<i", struct.pack("<I", word))[0]


def packed_rows(values, bits, order=None):
    """int32 of 32 / bits neighbours in a row, the first in the lowest bits; ``order``: the place of
    the number in each of the bits."""
    width = 32 // bits
    order = order or range(width)
    rows = []
    for row in values.tolist():
        row = row + [0] * (-len(row) % width)
        words = [row[n : n + width] for n in range(0, len(row), width)]
        rows.append(
            [
                signed(sum(word[place] << bits * n for n, place in enumerate(order)))
                for word in words
            ]
        )
    return torch.tensor(rows, dtype=torch.int32)


def scales_of(shape, dtype=torch.float16, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=draw) * 0.02 + 0.001).to(dtype)


def gptq(shape, bits=4, version="gptq", act_order=False):
    """[I * bits / 32, O]; zero points less one, modulo 2^bits, but in v2."""
    outputs, inputs = shape
    values, zeros = numbers((inputs, outputs), bits), numbers((inputs // GROUP, outputs), bits, 2)
    scales = scales_of((inputs // GROUP, outputs))
    index = torch.arange(inputs) // GROUP
    if act_order:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    stored = zeros if version == "gptq_v2" else (zeros - 1) % (1 << bits)
    expected = torch.empty(outputs, inputs)
    for i in range(inputs):
        g = int(index[i])
        expected[:, i] = (values[i] - zeros[g]).float() * scales[g].float()
    tensors = {
        "qweight": packed_rows(values.T, bits).T, "qzeros": packed_rows(stored, bits),
        "scales": scales, "g_idx": index.int(),
    }  # fmt: skip
    return tensors, expected


def awq(shape):
    """[I, O / 8]; eight outputs are in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits."""
    outputs, inputs = shape
    values, zeros = numbers((inputs, outputs), 4), numbers((inputs // GROUP, outputs), 4, 2)
    scales = scales_of((inputs // GROUP, outputs))
    groups = torch.arange(inputs) // GROUP
    expected = ((values - zeros[groups]).float() * scales[groups].float()).T
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": packed_rows(values, 4, order), "qzeros": packed_rows(zeros, 4, order),
        "scales": scales,
    }, expected  # fmt: skip


def compressed(shape, bits, symmetric=True, groups=True):
    """pack-quantized: numbers are stored plus half their range."""
    outputs, inputs = shape
    count, half = inputs // GROUP if groups else 1, 1 << bits - 1
    values, scales = numbers(shape, bits) - half, scales_of((outputs, count), torch.bfloat16)
    zeros = torch.zeros(outputs, count) if symmetric else numbers((outputs, count), bits, 3) - half
    wide = torch.arange(inputs) // (inputs // count)
    expected = (values - zeros[:, wide]).float() * scales[:, wide].float()
    tensors = {
        "weight_packed": packed_rows(values + half, bits), "weight_scale": scales,
        "weight_shape": torch.tensor(shape),
    }  # fmt: skip
    if not symmetric:
        tensors["weight_zero_point"] = packed_rows((zeros + half).T, bits).T
    return tensors, expected


def eight(shape, scales, dtype=torch.float8_e4m3fn, name="weight_scale"):
    draw = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=draw) * 20).to(dtype)
    factors = scales_of(scales, torch.float32)
    wide = factors if factors.ndim < 2 else factors.expand(shape[0], -1)
    if wide.ndim == 2:
        wide = wide.repeat_interleave(shape[1] // wide.shape[1], 1)
    return {"weight": values, name: factors}, values.float() * wide


CODE = [0.0, *(0.07 * n for n in range(1, 16))]
"""A table of 16 numbers: files have their own."""


def bits_and_bytes(shape, kind="nf4", nested=True, dtype="float16"):
    """Two numbers to a byte, the first in the upper bits."""
    count, blocksize = shape[0] * shape[1], 64
    places, table = numbers((count,), 4), torch.tensor(CODE)
    blocks = count // blocksize
    state = {"quant_type": kind, "blocksize": blocksize, "dtype": dtype, "shape": list(shape)}
    tensors = {"weight.quant_map": table}
    if nested:
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.25}
        small, inner = numbers((blocks,), 8, 4).byte(), torch.linspace(-1, 1, 256)
        outer = scales_of((-(-blocks // 16),), torch.float32)
        absmax = inner[small.int()] * outer[torch.arange(blocks) // 16] + 0.25
        tensors |= {"weight.absmax": small, "weight.nested_absmax": outer,
                    "weight.nested_quant_map": inner}  # fmt: skip
    else:
        absmax = scales_of((blocks,), torch.float32)
        tensors["weight.absmax"] = absmax
    expected = torch.empty(count)
    for n in range(count):
        expected[n] = table[places[n]] * absmax[n // blocksize]
    pairs = (places[::2] * 16 + places[1::2]).byte().unsqueeze(1)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors |= {"weight": pairs, f"weight.quant_state.bitsandbytes__{kind}": text}
    return tensors, expected.to(getattr(torch, dtype)).float().reshape(shape)


def eight_of_bits_and_bytes(shape):
    values, scales = (numbers(shape, 8) - 128).to(torch.int8), scales_of(shape[:1], torch.float32)
    expected = values.float() * scales[:, None] * 0.007874015718698502
    return {"weight": values, "SCB": scales, "weight_format": torch.tensor(0)}, expected


def ct(form, **weights):
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": group}}  # fmt: skip


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
INT4 = {"num_bits": 4, "type": "int", "group_size": GROUP}
FP8 = {"num_bits": 8, "type": "float"}
METHODS = {
    "gptq": (GPTQ, gptq),
    "gptq,8 bits": (GPTQ | {"bits": 8}, lambda s: gptq(s, 8)),
    "gptq,act order": (GPTQ | {"desc_act": True}, lambda s: gptq(s, act_order=True)),
    "gptq,v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda s: gptq(s, version="gptq_v2")),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
    "int4": (ct("pack-quantized", **INT4), lambda s: compressed(s, 4)),
    "int4,zero points": (ct("pack-quantized", **INT4), lambda s: compressed(s, 4, False)),
    "int8,packed": (ct("pack-quantized", num_bits=8, type="int", group_size=None),
                    lambda s: compressed(s, 8, groups=False)),
    "int8": (ct("int-quantized", num_bits=8, type="int"),
             lambda s: eight(s, (s[0], 1), torch.int8)),
    "fp8,rows": (ct("float-quantized", **FP8), lambda s: eight(s, (s[0], 1))),
    "fp8,whole": (ct("float-quantized", **FP8), lambda s: eight(s, (1,))),
    "fp8,groups": (ct("float-quantized", **FP8, group_size=GROUP),
                   lambda s: eight(s, (s[0], s[1] // GROUP))),
    "fp8,autofp8": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda s: eight(s, ())),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
               lambda s: eight(s, (s[0], 1))),
    "nf4": (BNB, bits_and_bytes),
    "nf4,bfloat16": (BNB, lambda s: bits_and_bytes(s, nested=False, dtype="bfloat16")),
    "fp4": (BNB, lambda s: bits_and_bytes(s, "fp4", nested=False)),
    "bitsandbytes,8 bits": ({"load_in_8bit": True}, eight_of_bits_and_bytes),
}  # fmt: skip
"""``quantization_config``, and a function of a shape that returns the parts of a random weight and
the weight."""
KEPT = ("gptq", "int4", "fp8,rows", "nf4")


def folder_of(method, tmp_path):
    """A Llama whose linear layers are quantised; returns the weights by their names."""
    config, make = METHODS[method]
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    tensors, weights = {}, {}
    for name, values in load_file(tmp_path / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = weights[name] = values
            continue
        parts, weights[name] = make(tuple(values.shape))
        stem = name.removesuffix(".weight")
        tensors |= {f"{stem}.{part}": value.contiguous() for part, value in parts.items()}
        if "compressed" in str(config):
            tensors[f"{stem}.input_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content | {"quantization_config": config}))
    return weights


@pytest.mark.parametrize("method", sampled(METHODS, lambda method: method in KEPT))
def test_numbers_against_their_description(method, tmp_path):
    weights = folder_of(method, tmp_path)
    source = HuggingFaceFolder(tmp_path)
    for ours, parameter in ((n, source._parameters[n]) for n in source.names()):
        expected = parameter.from_hf([weights[name].float() for name in parameter.theirs])
        assert torch.equal(source.tensor(ours), expected), ours
        assert source.dtype(ours) in ("float32", "float16", "bfloat16")


def edit(tmp_path, change):
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path, {"format": "pt"})


Q = "model.layers.0.self_attn.q_proj"
WITHOUT = {
    "gptq": ("scales", "its scales are missing"), "awq": ("scales", "its scales are missing"),
    "int4": ("weight_shape", "its shape are missing"),
    "fp8,rows": ("weight_scale", "numbers of 8 bits .* require scales"),
    "nf4": ("weight.absmax", "its scales are missing"),
    "bitsandbytes,8 bits": ("SCB", "numbers of 8 bits .* require scales"),
}  # fmt: skip


@pytest.mark.parametrize("method", sampled(WITHOUT, "gptq".__eq__))
def test_a_missing_part_is_named(method, tmp_path):
    part, message = WITHOUT[method]
    folder_of(method, tmp_path)
    edit(tmp_path, lambda t: {n: v for n, v in t.items() if n != f"{Q}.{part}"})
    with pytest.raises(CheckpointError, match=rf"{Q}[.\w]*(: {message}|, .*|; .*)"):
        source = HuggingFaceFolder(tmp_path)
        for name in source.names():
            source.tensor(name)


def replaced(part, value):
    return lambda tensors: tensors | {f"{Q}.{part}": value(tensors[f"{Q}.{part}"])}


def state(**changes):
    def edited(stored):
        content = json.loads(bytes(stored.tolist())) | changes
        return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)

    return edited


NF4 = "weight.quant_state.bitsandbytes__nf4"
WRONG = [
    ("gptq", replaced("g_idx", lambda v: v + 7), "inputs are in groups up to 8, of 2"),
    ("gptq", replaced("g_idx", lambda v: v[:5].clone()), r"its g_idx must have .* \(32,\)"),
    ("gptq", replaced("qzeros", lambda v: v[:1].clone()), r"its qzeros must have .* \(2, 4\)"),
    ("gptq", replaced("qweight", lambda v: v.float()), "packed numbers must be int32"),
    ("gptq", replaced("qweight", lambda v: v[0].clone()), "its qweight must be a matrix"),
    ("gptq", replaced("qweight", lambda v: v[:2].clone()), r"its g_idx must have .* \(16,\)"),
    ("awq", replaced("scales", lambda v: v[:, :3].clone()), r"its scales must have the shape"),
    ("awq", replaced("scales", lambda v: v.int()), "its scales must be numbers of floating point"),
    ("int4", replaced("weight_shape", lambda v: v * 2**40), "a weight cannot have the shape"),
    ("int4", replaced("weight_shape", lambda v: -v), "a weight cannot have the shape"),
    ("int4", replaced("weight_shape", lambda v: v + 9), "its packed numbers must have the shape"),
    ("int4", replaced("weight_scale", lambda v: v[:, :1].repeat(1, 5)), "5 groups of 16"),
    ("fp8,rows", replaced("weight_scale", lambda v: v[:3].clone()), "requires scales"),
    ("nf4", replaced(NF4, lambda v: v[:20].clone()), "its quant_state"),
    ("nf4", replaced(NF4, state(shape=[2**40, 2**40])), "a weight cannot have the shape"),
    ("nf4", replaced(NF4, state(shape=[2**20, 64])), "its numbers must have the shape"),
    ("nf4", replaced(NF4, state(blocksize=0)), "its quant_state must have"),
    ("nf4", replaced(NF4, state(blocksize=128)), "its absmax must have the shape"),
    ("nf4", replaced(NF4, state(dtype="float8")), "its quant_state must have"),
    ("bitsandbytes,8 bits", replaced("weight_format", lambda v: v + 2), "weight_format is not"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "change", "message"), sampled(WRONG, lambda case: case is WRONG[0])
)
def test_parts_that_do_not_fit_are_refused(method, change, message, tmp_path):
    folder_of(method, tmp_path)
    edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: {Q}[.\w]*: .*{message}"):
        source = HuggingFaceFolder(tmp_path)
        for name in source.names():
            source.tensor(name)


CONFIGS = [
    ({"quant_method": "torchao"}, "quantised weights of torchao are not read here"),
    ({"quant_method": "quark"}, "quantised weights of quark are not read"),
    (GPTQ | {"bits": 3}, r"\(gptq\): bits 3 must be one of \(2, 4, 8\)"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    (GPTQ | {"group_size": "x"}, "group_size 'x' is not a size"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "only 4 bits in gemm"),
    (ct("nvfp4-pack-quantized", num_bits=4, type="float"), "format nvfp4-pack-quantized must be"),
    (ct("pack-quantized", num_bits=3, type="int"), "num_bits 3"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "config_groups"),
    (ct("float-quantized", **FP8) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
     "sparsity_config"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), CONFIGS)
def test_other_methods_are_refused_by_name(config, message, tmp_path):
    folder_of("gptq", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config.*{message}"):
        HuggingFaceFolder(tmp_path)


def unpacked(config, tensors, name="x.weight"):
    """The weight that is read of one layer ``x``."""
    tensors = {f"x.{part}": value for part, value in tensors.items()}
    for form in packing_of({"quantization_config": config}, "config.json").forms:
        for actual, names in form.claim(set(tensors)).items():
            assert actual == name
            parts = StoredParts(names, lambda n: tuple(tensors[n].shape), tensors.__getitem__)
            assert form.shape(parts) == form.unpack(parts).shape
            return form.unpack(parts)
    raise AssertionError("nothing is claimed")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_four_bits_against_bitsandbytes(kind, nested, dtype):
    """(Its CPU kernel is wrong for rows that are no whole blocks, which its CUDA kernel reads as
    here: as one row of all numbers.)"""
    F = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 128, generator=draw).to(dtype)
    packed, state = F.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {f"weight.{n}": v for n, v in state.as_dict(packed=True).items()} | {"weight": packed}
    expected = F.dequantize_4bit(packed, state)
    assert torch.equal(unpacked(BNB, tensors), expected)


def test_eight_bits_against_bitsandbytes():
    F = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).half()
    numbers, scales, _ = F.int8_vectorwise_quant(weight)
    expected = F.int8_vectorwise_dequant(numbers, scales)
    assert torch.equal(unpacked(BNB, {"weight": numbers, "SCB": scales}), expected)


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
                            "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ],
)  # fmt: skip
def test_against_compressed_tensors(form, settings):
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compressed-tensors is not installed"
    )
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    arguments = quantization.QuantizationArgs(**settings)
    parts = weight.view(48, -1, settings.get("group_size", 64))
    if settings["strategy"] == "tensor":
        parts = weight.view(1, 1, -1)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), arguments)
    if settings["strategy"] == "tensor":
        scale, zero = scale.flatten(), zero.flatten()
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = BaseCompressor.get_value_from_registry(form)
    given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    tensors = compressor.compress(given, scheme)
    expected = compressor.decompress(tensors, scheme)["weight"]
    config = ct(form, **settings)
    assert torch.equal(unpacked(config, tensors), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_written_against_compressed_tensors(dtype):
    """Its scales, its numbers, and the weight that it makes of them, bit by bit."""
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="compressed-tensors is not installed"
    )
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[5] = 0
    written, scales = quantised(weight)
    scheme = quantization.preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    rows = weight.float().amin(1, keepdim=True), weight.float().amax(1, keepdim=True)
    expected, _ = calculate_qparams(*rows, scheme.weights)
    assert torch.equal(scales, expected)
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    tensors = compressor.compress({"weight": weight.float(), "weight_scale": scales}, scheme)
    assert torch.equal(tensors["weight"].float(), written.float())
    read = unpacked(_config([]), {"weight": written, "weight_scale": scales})
    assert torch.equal(compressor.decompress(tensors, scheme)["weight"], read)
    plain = quantization.QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=[], format="float-quantized",
        quantization_status="compressed",
    ).to_dict()  # fmt: skip
    group, known = (each["config_groups"]["group_0"] for each in (_config([]), plain))
    assert all(
        known[part][key] == value
        for part in ("weights", "input_activations") for key, value in group[part].items()
    )  # fmt: skip
    assert {**_config([]), "config_groups": 0} | plain == plain | {
        key: plain[key] for key in _config([])
    }


@pytest.mark.parametrize("model_type", sampled(["llama", "mixtral"], "llama".__eq__))
def test_folders_in_float8_for_serving(model_type, hf_folder, tmp_path, capsys):
    """Half a unit of three mantissa bits is lost of linear layers, and nothing of other weights;
    transformers, where it can read such folders, computes what we read."""
    settings = SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2}
    theirs = hf_folder(model_type, **(settings if model_type == "mixtral" else SIZES))
    out = tmp_path / "out"
    to_hf(["--load", str(theirs), "--output", str(out), "--quantize", "fp8",
           "--max-shard-size", "20KB"])  # fmt: skip
    assert "in 8 bits logits differ" in capsys.readouterr().out
    before, after = HuggingFaceFolder(theirs), HuggingFaceFolder(out)
    assert after.model == before.model and len([*out.glob("*.safetensors")]) > 1
    linear = (".qkv.weight", ".proj.weight", ".up.weight", ".down.weight")
    for name in before.names():
        exact, near = before.tensor(name), after.tensor(name)
        if not name.endswith(linear):
            assert torch.equal(exact, near), name
            continue
        bound = exact.abs() / 16 + exact.abs().amax(-1, keepdim=True) / 448 / 512
        assert ((near - exact).abs() <= bound * 1.0001).all(), name
        assert not torch.equal(near, exact)
    stored = {k: v for f in out.glob("*.safetensors") for k, v in load_file(f).items()}
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == stored.keys()
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    gates = ["model.layers.0.block_sparse_moe.gate"] if model_type == "mixtral" else []
    assert kept == ["lm_head", *gates]
    eight = {name for name, values in stored.items() if values.dtype == torch.float8_e4m3fn}
    assert all("proj" in name or ".experts." in name for name in eight)
    assert {f"{name}_scale" for name in eight} == {n for n in stored if n.endswith("_scale")}


def test_transformers_reads_what_is_written(hf_folder, tmp_path):
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    theirs, out = hf_folder("llama", **SIZES), tmp_path / "out"
    to_hf(["--load", str(theirs), "--output", str(out), "--quantize", "fp8"])
    read = LlamaForCausalLM.from_pretrained(
        out, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    source = HuggingFaceFolder(out)
    values = read.state_dict()
    for name in source.names():
        parameter = source._parameters[name]
        expected = parameter.from_hf([values[each] for each in parameter.theirs])
        assert torch.equal(source.tensor(name), expected.float()), name


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [("gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4}, "GPT-2 has .*, which is transposed"),
     ("granitemoe", SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2},
      "Granite-MoE has .*, which is of all experts")],
)  # fmt: skip
def test_weights_of_no_linear_module_are_refused(
    model_type, settings, message, hf_folder, tmp_path
):
    theirs = hf_folder(model_type, **settings)
    with pytest.raises(ValueError, match=message):
        to_hf(["--load", str(theirs), "--output", str(tmp_path / "out"), "--quantize", "fp8"])
    assert not (tmp_path / "out").exists()


def test_against_autoawq():
    awq_module = pytest.importorskip("awq.utils.packing_utils", reason="AutoAWQ is not installed")
    tensors, _ = awq((48, 64))
    expected = awq_module.dequantize_gemm(*tensors.values(), 4, GROUP)
    assert torch.equal(unpacked(METHODS["awq"][0], tensors).half().T, expected)


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith("gptq")])
def test_against_gptqmodel(method):
    module = pytest.importorskip(
        "gptqmodel.nn_modules.qlinear.torch", reason="GPTQModel is not installed"
    )
    config, make = METHODS[method]
    tensors, _ = make((64, 96))
    layer = module.TorchLinear(
        bits=config["bits"], group_size=GROUP, sym=False, desc_act=config["desc_act"],
        in_features=96, out_features=64, bias=False, register_buffers=True,
    )  # fmt: skip
    stored = dict(tensors)
    if "v2" not in method:  # its layers compute with the second form
        bits = config["bits"]
        zeros = unpacked_words(stored["qzeros"], bits)
        stored["qzeros"] = packed_rows((zeros + 1) % (1 << bits), bits)
    layer.load_state_dict({n: v.contiguous() for n, v in stored.items()}, strict=False)
    expected = layer.dequantize_weight()
    assert torch.equal(unpacked(config, tensors).half().T, expected.half())


def unpacked_words(words, bits):
    """The numbers of int32 words, one after another."""
    rows = [[(word & 0xFFFFFFFF) >> n & (1 << bits) - 1 for word in row for n in range(0, 32, bits)]
            for row in words.tolist()]  # fmt: skip
    return torch.tensor(rows)
