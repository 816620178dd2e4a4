"""Folders of other trainers and sharded checkpoints, all of one small Llama, as their programs
write them."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import yaml
from fuzz.fuzzer import Fuzzer
from fuzz.readers.checkpoints import (
    CONFIG,
    GROUPS,
    HEADS,
    F,
    H,
    V,
    read_all,
    shapes,
    weights,
    write_huggingface,
)  # fmt: skip
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint.source import open_checkpoint
from megatron.formats.sharded.files import ShardedFiles
from megatron.formats.sharded.writer import ShardedWriter, write_torch_dist

D = H // HEADS
BLOCK = "model.layers.0"
STEP = 7.0
"""Adam's number of steps where there are moments."""


def save_dcp(folder: Path, state: dict[str, object]) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def moments(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Adam's state of each weight, from which tests know the weight."""
    return {
        name: {"exp_avg": values / 2, "exp_avg_sq": values**2, "step": torch.tensor(STEP)}
        for name, values in tensors.items()
    }


def pairs_from_halves(values: Tensor, heads: int) -> Tensor:
    """Rows of a head in the order 0, D/2, 1, D/2 + 1, ..., of Meta's rotation."""
    order = [head * D + n for head in range(heads) for i in range(D // 2) for n in (i, i + D // 2)]
    return values[order]


def titan_weights() -> dict[str, Tensor]:
    theirs = {
        "self_attn.q_proj": "attention.qkv_linear.wq",
        "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.v_proj": "attention.qkv_linear.wv", "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    result = {}
    for name, values in weights().items():
        inner = name.removeprefix(f"{BLOCK}.").removesuffix(".weight")
        if "q_proj" in name or "k_proj" in name:
            values = pairs_from_halves(values, HEADS if "q_proj" in name else GROUPS)
        outside = {
            "model.embed_tokens": "tok_embeddings",
            "model.norm": "norm",
            "lm_head": "lm_head",
        }
        place = f"layers.0.{theirs[inner]}" if inner in theirs else outside[inner]
        result[f"{place}.weight"] = values
    return result


def write_titan(folder: Path) -> None:
    tensors = titan_weights()
    fused = dict(tensors)
    parts = [fused.pop(f"layers.0.attention.qkv_linear.w{part}.weight") for part in "qkv"]
    groups = [part.unflatten(0, (GROUPS, -1)) for part in parts]
    fused["layers.0.attention.qkv_linear.wqkv.weight"] = torch.cat(groups, 1).flatten(0, 1)
    flat = {f"state.{n}.{kind}": v for n, s in moments(fused).items() for kind, v in s.items()}
    counters = {"train_state": {"step": 10}, "lr_scheduler": {"last_epoch": 10}}
    save_dcp(folder / "step-10", {**tensors, "optimizer": flat, **counters})
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_fsdp(folder: Path) -> None:
    save_dcp(folder / "pytorch_model_fsdp_0", {"model": weights()})
    save_dcp(folder / "optimizer_0", {"optimizer": {"state": moments(weights())}})
    (folder / "trainer_state.json").write_text('{"global_step": 9}')
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_core(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        write_huggingface(Path(temporary))
        write_torch_dist(open_checkpoint(temporary), folder, "float32")


NEMO_YAML = f"""\
_target_: nemo.collections.llm.gpt.model.llama.LlamaModel
config:
  _target_: nemo.collections.llm.gpt.model.llama.LlamaConfig
  activation_func:
    _call_: false
    _target_: torch.nn.functional.silu
  add_bias_linear: false
  add_qkv_bias: false
  attention_dropout: 0.0
  bf16: true
  bias_activation_fusion: true
  ffn_hidden_size: {F}
  gated_linear_unit: true
  hidden_dropout: 0.0
  hidden_size: {H}
  init_method_std: 0.02
  kv_channels: null
  layernorm_epsilon: 1.0e-05
  layernorm_zero_centered_gamma: false
  make_vocab_size_divisible_by: 128
  normalization: RMSNorm
  num_attention_heads: {HEADS}
  num_layers: 1
  num_moe_experts: null
  num_query_groups: {GROUPS}
  params_dtype:
    _call_: false
    _target_: torch.bfloat16
  position_embedding_type: rope
  qk_layernorm: false
  rotary_base: 10000
  rotary_interleaved: false
  rotary_percent: 1.0
  seq_len_interpolation_factor: null
  seq_length: 16
  share_embeddings_and_output_weights: false
  tensor_model_parallel_size: 1
  vocab_size: null
  window_size: null
"""


def write_nemo(folder: Path) -> None:
    """A folder of NeMo 2: Megatron-Core's tensors under ``module.``, without the arguments."""
    (folder / "context").mkdir(parents=True)
    (folder / "context" / "model.yaml").write_text(NEMO_YAML)
    place = folder / "weights"
    place.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        write_core(Path(temporary))
        (core,) = Path(temporary).glob("*/.metadata")
        files, writer = ShardedFiles(core.parent), ShardedWriter(place)
        for name in files.tensors:
            writer.add(f"module.{name}", files.tensor(name))
        writer.finish()
        shutil.copy(core.parent / "metadata.json", place)
    loops = {"epoch_progress": {"current": {"completed": 0}}}
    common = {"epoch": 0, "global_step": 9, "loops": {"fit_loop": loops}}
    torch.save(common | {"pytorch-lightning_version": "2.4.0"}, place / "common.pt")


LIT_CONFIG = {
    "name": "small", "hf_config": {}, "block_size": 16, "n_layer": 1, "n_embd": H,
    "vocab_size": V, "padding_multiple": 8, "padded_vocab_size": V, "norm_class_name": "RMSNorm",
    "norm_eps": 1e-5, "parallel_residual": False, "n_head": HEADS, "head_size": D,
    "n_query_groups": GROUPS, "rope_base": 10000, "rotary_percentage": 1.0, "bias": False,
    "intermediate_size": F, "mlp_class_name": "LLaMAMLP", "gelu_approximate": "none",
    "shared_attention_norm": False, "norm_1": True, "norm_2": True, "rope_condense_ratio": 1,
}  # fmt: skip


def write_litgpt(folder: Path) -> None:
    tensors = weights()
    attention = f"{BLOCK}.self_attn."
    qkv = torch.cat([tensors.pop(f"{attention}{part}_proj.weight") for part in "qkv"])
    theirs = {
        "self_attn.o_proj": "attn.proj", "mlp.gate_proj": "mlp.fc_1", "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj", "input_layernorm": "norm_1",
        "post_attention_layernorm": "norm_2",
    }  # fmt: skip
    outside = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    named = {"transformer.h.0.attn.qkv.weight": qkv}
    for name, values in tensors.items():
        inner = name.removeprefix(f"{BLOCK}.").removesuffix(".weight")
        place = f"transformer.h.0.{theirs[inner]}" if inner in theirs else outside.get(inner, inner)
        named[f"{place}.weight"] = values
    torch.save(named, folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(LIT_CONFIG))


NANO_CONFIG = {
    "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": H,
    "initializer_range": 0.02, "intermediate_size": F, "is_llama_config": True,
    "max_position_embeddings": 16, "num_attention_heads": HEADS, "num_hidden_layers": 1,
    "num_key_value_heads": GROUPS, "pad_token_id": None, "pretraining_tp": 1, "rms_norm_eps": 1e-5,
    "rope_scaling": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": V,
}  # fmt: skip


def write_nanotron(folder: Path) -> None:
    """Two tensor ranks: rows of the fused matrices are cut part by part, o_proj and down_proj by
    columns."""
    tensors = weights()
    at = f"{BLOCK}.self_attn."
    parts = [
        pairs_from_halves(tensors[f"{at}q_proj.weight"], HEADS),
        pairs_from_halves(tensors[f"{at}k_proj.weight"], GROUPS),
        tensors[f"{at}v_proj.weight"],
    ]
    gate_up = [tensors[f"{BLOCK}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    block = "decoder/0/pp_block"
    write_nano(folder, f"{block}/attn/qkv_proj", parts, 0)
    write_nano(folder, f"{block}/mlp/gate_up_proj", gate_up, 0)
    write_nano(folder, f"{block}/attn/o_proj", [tensors[f"{at}o_proj.weight"]], 1)
    write_nano(folder, f"{block}/mlp/down_proj", [tensors[f"{BLOCK}.mlp.down_proj.weight"]], 1)
    table = "token_position_embeddings/pp_block/token_embedding"
    write_nano(folder, table, [tensors["model.embed_tokens.weight"]], 0)
    write_nano(folder, "lm_head/pp_block", [tensors["lm_head.weight"]], 0)
    for module, name in (
        (f"{block}/input_layernorm", f"{BLOCK}.input_layernorm"),
        (f"{block}/post_attention_layernorm", f"{BLOCK}.post_attention_layernorm"),
        ("final_layer_norm/pp_block", "model.norm"),
    ):
        write_nano(folder, module, [tensors[f"{name}.weight"]], None)
    config = {"model": {"model_config": NANO_CONFIG, "dtype": "bfloat16"}, "general": {"seed": 1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "checkpoint_metadata.json").write_text('{"version": "1.4", "tp": 2, "dp": 1}')


def write_nano(folder: Path, module: str, parts: list[Tensor], dim: int | None) -> None:
    place = folder / "model" / "model" / module
    place.mkdir(parents=True)
    if dim is None:
        save_file({"data": parts[0]}, place / "model_weight.safetensors", {"format": "pt"})
        return
    whole = torch.cat(parts)
    for rank in range(2):
        pieces, pairs, local, start = [], [], 0, 0
        for part in parts:
            piece = part.chunk(2, dim)[rank]
            size, first = piece.shape[dim], start + rank * piece.shape[dim]
            text = ["None,None,None"] * 2
            spans = [f"{local},{local + size},None", f"{first},{first + size},None"]
            texts = ["|".join([*text[:dim], span, *text[dim + 1 :]]) for span in spans]
            pairs.append("#".join(texts))
            pieces.append(piece)
            local, start = local + size, start + part.shape[dim]
        name = f"model_weight_pp-rank-0-of-1_tp-rank-{rank}-of-2.safetensors"
        facts = {
            "version": "1.4", "unsharded_shape": str(tuple(whole.shape)),
            "local_global_slices_pairs": ";".join(pairs),
        }  # fmt: skip
        save_file({"data": torch.cat(pieces, dim).contiguous()}, place / name, facts)


OLMO_CONFIG = {
    "model": {
        "d_model": H, "n_layers": 1, "vocab_size": V, "name": "default", "dtype": "float32",
        "block": {
            "name": "default",
            "attention": {
                "name": "default", "n_heads": HEADS, "n_kv_heads": GROUPS, "bias": False,
                "rope": {"name": "default", "theta": 10000},
            },
            "feed_forward": {"hidden_size": F, "bias": False},
            "layer_norm": {"name": "rms", "eps": 1e-5, "bias": False},
        },
        "lm_head": {"layer_norm": {"name": "rms", "eps": 1e-5, "bias": False}, "bias": False},
    },
    "dataset": {"sequence_length": 16},
}  # fmt: skip


def olmo2_weights() -> dict[str, Tensor]:
    """Weights of the Llama, with OLMo 2's norms of queries, keys, and outputs of sublayers."""
    tensors = weights()
    del tensors[f"{BLOCK}.input_layernorm.weight"]
    for name, size in (("q_norm", H), ("k_norm", GROUPS * D)):
        tensors[f"{BLOCK}.self_attn.{name}.weight"] = torch.linspace(0.5, 1.5, size)
    tensors[f"{BLOCK}.post_feedforward_layernorm.weight"] = torch.linspace(0.2, 2.0, H)
    return tensors


def write_olmo_core(folder: Path, reordered: bool = False) -> None:
    theirs = {
        "self_attn.q_proj": "attention.w_q", "self_attn.k_proj": "attention.w_k",
        "self_attn.v_proj": "attention.w_v", "self_attn.o_proj": "attention.w_out",
        "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
    }  # fmt: skip
    outside = {
        "model.embed_tokens": "embeddings", "model.norm": "lm_head.norm",
        "lm_head": "lm_head.w_out",
    }  # fmt: skip
    config: dict[str, Any] = json.loads(json.dumps(OLMO_CONFIG))
    if reordered:
        theirs |= {
            "self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm",
            "post_attention_layernorm": "attention_norm",
            "post_feedforward_layernorm": "feed_forward_norm",
        }  # fmt: skip
        block = config["model"]["block"]
        block["name"] = "reordered_norm"
        block["attention"]["qk_norm"] = block["layer_norm"]
    state = {}
    for name, values in (olmo2_weights() if reordered else weights()).items():
        inner = name.removeprefix(f"{BLOCK}.").removesuffix(".weight")
        place = f"blocks.0.{theirs[inner]}" if inner in theirs else outside[inner]
        state[f"{place}.weight"] = values
    save_dcp(folder / "model_and_optim", {"model": state, "optim": {"state": moments(state)}})
    (folder / "config.json").write_text(json.dumps(config))


def write_zero(folder: Path, stage: int = 3, ranks: int = 2) -> None:
    """A folder of transformers' Trainer at a ZeRO stage, without 16-bit weights."""
    tensors = weights()
    place = folder / "global_step5"
    place.mkdir()
    (folder / "latest").write_text("global_step5")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sizes = [OrderedDict((name, torch.Size(shape)) for name, shape in shapes().items())]
    flat = torch.cat([tensors[name].reshape(-1) for name in sizes[0]])
    share = -(-flat.numel() // ranks)
    for rank in range(ranks):
        state: dict[str, object] = {"zero_stage": stage}
        if stage == 3:
            pieces = []
            for values in tensors.values():
                part = -(-values.numel() // ranks)
                piece = values.reshape(-1)[rank * part : (rank + 1) * part]
                pieces.append(torch.nn.functional.pad(piece, (0, part - piece.numel())))
            mine = torch.cat(pieces)
            state |= {"partition_count": ranks, "fp32_flat_groups": [mine]}
        else:
            from deepspeed.utils.tensor_fragment import fragment_address

            mapping, start, first = OrderedDict(), 0, rank * share
            for name, values in tensors.items():
                low = max(start, first)
                high = min(start + values.numel(), first + share)
                if low < high:
                    mapping[name] = fragment_address(numel=high - low, start=low - first)
                start += values.numel()
            mine = torch.nn.functional.pad(flat[first : first + share], (0, 0))
            state |= {
                "partition_count": [ranks], "single_partition_of_fp32_groups": [mine],
                "param_slice_mappings": [mapping],
            }  # fmt: skip
        inner = {"exp_avg": mine / 2, "exp_avg_sq": mine**2}
        groups = [{"step": int(STEP), "params": [0]}]
        if stage == 3:
            state["optimizer_state_dict"] = {"state": {0: inner}, "param_groups": groups}
        else:
            state["base_optimizer_state"] = {"state": {0: inner}, "param_groups": groups}
        model = {
            "module": {n: v.bfloat16() for n, v in tensors.items()} if stage < 3 else {},
            "param_shapes": sizes, "dp_world_size": ranks, "shared_params": {}, "buffer_names": [],
            "global_steps": 9, "global_samples": 72, "lr_scheduler": {"last_epoch": 8},
            "frozen_param_shapes": None, "frozen_param_fragments": None,
            "ds_version": "0.19.8", "ds_config": {},
        }  # fmt: skip
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        if stage == 3 or rank == 0:
            name = f"{prefix}_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(model, place / name)
        torch.save(
            {"optimizer_state_dict": state, "ds_version": "0.19.8", "ds_config": {}},
            place / f"{prefix}_optim_states.pt",
        )


FUZZERS = (
    Fuzzer("torch-dist", write_core, read_all, heavy=True),
    Fuzzer("nemo", write_nemo, read_all, heavy=True),
    Fuzzer("dcp", write_fsdp, read_all, heavy=True),
    Fuzzer("torchtitan", write_titan, read_all, heavy=True),
    Fuzzer("litgpt", write_litgpt, read_all, heavy=True),
    Fuzzer("nanotron", write_nanotron, read_all, heavy=True),
    Fuzzer("olmo-core", write_olmo_core, read_all, heavy=True),
    Fuzzer("trainer-zero", write_zero, read_all, heavy=True),
)
