"""Quantised weights: GGUF files, and folders of Hugging Face in each of the forms that are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from fuzz.fuzzer import Fuzzer
from fuzz.readers.checkpoints import CONFIG, GROUPS, HEADS, H, V, read_all, weights
from safetensors.torch import save_file

try:
    import gguf
    import transformers.integrations.gguf.gguf_tokenizer_mapping  # noqa: F401
    from gguf import quants
except ModuleNotFoundError:  # an optional package
    gguf = None

GROUP = 8
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
}  # fmt: skip
_KEYS = {
    "context_length": 16, "embedding_length": H, "block_count": 1, "feed_forward_length": 24,
    "attention.head_count": HEADS, "attention.head_count_kv": GROUPS, "rope.dimension_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.scaling.factor": 2.0,
    "rope.scaling.type": "linear", "vocab_size": V,
}  # fmt: skip


_WIDE = {H: 32, 24: 32, H // HEADS * GROUPS: 16}
_WIDE_KEYS = {"embedding_length": 32, "feed_forward_length": 32, "rope.dimension_count": 8}
"""Sizes with rows of whole blocks."""


_FACTORS = {
    name: 0.5 for name in ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")
}


def write_gguf_file(folder: Path, kind: str = "F32", name: str = "llama") -> None:
    """A Llama or Granite with byte-level tokens, its matrices in a type of ggml."""
    writer = gguf.GGUFWriter(folder / "model.gguf", name)
    wide, further = kind != "F32", _FACTORS if name == "granite" else {}
    for key, value in (_KEYS | further | (_WIDE_KEYS if wide else {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{name}.{key}", value)
    tokens = [*"abcdefghijklmnopqrstuvwxyz", "ab", "abc", "\u0120", "\u0120a", "<|end|>", "!"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 30 + [3, 1])
    writer.add_token_merges(["a b", "ab c", "\u0120 a"])
    writer.add_eos_token_id(30)
    for tensor, values in weights().items():
        for theirs, stored in _NAMES.items():
            tensor = tensor.replace(theirs, stored)
        form, array = gguf.GGMLQuantizationType[kind], values.numpy()
        if wide:
            array = np.ones([_WIDE.get(size, size) for size in values.shape], np.float32)
        if array.ndim > 1:
            writer.add_tensor(tensor, quants.quantize(array, form), raw_dtype=form)
        else:
            writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)


def _gptq(o: int, i: int) -> dict[str, torch.Tensor]:
    return {
        "qweight": _words(i // 8, o), "qzeros": _words(i // GROUP, o // 8),
        "scales": torch.rand(i // GROUP, o).half(), "g_idx": (torch.arange(i) // GROUP).int(),
    }  # fmt: skip


def _awq(o: int, i: int) -> dict[str, torch.Tensor]:
    groups = i // GROUP
    return {
        "qweight": _words(i, o // 8), "qzeros": _words(groups, o // 8),
        "scales": torch.rand(groups, o).half(),
    }  # fmt: skip


def _int4(o: int, i: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": _words(o, i // 8), "weight_scale": torch.rand(o, i // GROUP),
        "weight_shape": torch.tensor([o, i]), "weight_zero_point": _words(o // 8, i // GROUP),
    }  # fmt: skip


def _fp8(o: int, i: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randn(o, i).to(torch.float8_e4m3fn), "weight_scale": torch.rand(o, 1)}


def _nf4(o: int, i: int) -> dict[str, torch.Tensor]:
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": [o, i],
             "nested_blocksize": 16, "nested_offset": 0.1}  # fmt: skip
    blocks = o * i // 32
    return {
        "weight": torch.randint(256, (o * i // 2, 1)).byte(),
        "weight.absmax": torch.randint(256, (blocks,)).byte(), "weight.quant_map": torch.rand(16),
        "weight.nested_absmax": torch.rand(-(-blocks // 16)),
        "weight.nested_quant_map": torch.rand(256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }  # fmt: skip


def _int8(o: int, i: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.randint(-128, 127, (o, i)).to(torch.int8), "SCB": torch.rand(o),
            "weight_format": torch.tensor(0, dtype=torch.uint8)}  # fmt: skip


def _compressed(form: str, **weights: object) -> dict[str, object]:
    groups = {"group_0": {"weights": weights, "targets": ["Linear"]}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


_FORMS: dict[str, tuple[dict[str, object], Callable[[int, int], dict[str, torch.Tensor]]]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, _gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, _awq),
    "int4": (_compressed("pack-quantized", num_bits=4, type="int", group_size=GROUP), _int4),
    "fp8": (_compressed("float-quantized", num_bits=8, type="float"), _fp8),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _int8),
}  # fmt: skip


def quantised(name: str) -> Callable[[Path], None]:
    """A function that writes the Llama with linear layers of random numbers in a form."""
    config, make = _FORMS[name]

    def write(folder: Path) -> None:
        torch.manual_seed(0)
        (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": config}))
        tensors = {}
        for name, values in weights().items():
            if "proj" not in name:
                tensors[name] = values
                continue
            stem = name.removesuffix("weight")
            tensors |= {stem + part: v.contiguous() for part, v in make(*values.shape).items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return write


_GGUF = (
    Fuzzer("gguf", write_gguf_file, read_all, heavy=True),
    Fuzzer("gguf-q8_0", partial(write_gguf_file, kind="Q8_0"), read_all, heavy=True),
    Fuzzer("gguf-granite", partial(write_gguf_file, name="granite"), read_all, heavy=True),
)
FUZZERS = (
    *(Fuzzer(f"packed-{name}", quantised(name), read_all, heavy=True) for name in _FORMS),
    *(() if gguf is None else _GGUF),
)
