"""Decoders that differ from Llama in only a few keys: IQuest-Coder, InternLM3, Ministral, CWM,
Seed-OSS, HunYuan, ERNIE 4.5, Helium and SmolLM3. Also Gemma 1 and VaultGemma: they are Gemma 2
without norms after attention and MLP, and Gemma 1 has neither windows nor softcaps.
"""

from __future__ import annotations

from typing import Any

from megatron.config import ModelConfig
from megatron.formats.features import Requirement
from megatron.formats.huggingface.config_reader import (
    BIASES,
    FULL,
    SLIDING,
    HFConfigReader,
    read_rope,
    read_windows,
    write_rope,
)
from megatron.formats.huggingface.decoders.relatives import (
    SIZES,
    relative,
    relative_entries,
    rotating,
    scaled_by_default,
    without_rope,
)
from megatron.formats.huggingface.entries import INTERLEAVED_QKV, norm
from megatron.formats.huggingface.llama import DIVISIBLE, GEMMA2, HEAD_DIM, read_gemma, write_gemma

IQUEST_CODER = relative(
    "IQuest-Coder", "iquestcoder", "LlamaForCausalLM", biases=BIASES, requirements=(DIVISIBLE,),
    rewards=False,
)  # fmt: skip
"""IQuest-Coder: Llama under another name."""

INTERNLM3 = relative(
    "InternLM3", "internlm3", "LlamaForCausalLM", biases=BIASES, rewards=False,
    requirements=(
        DIVISIBLE,
        Requirement(
            lambda model: model.mlp.bias == model.attention.proj_bias,
            "no --add-attention-bias and no --add-mlp-bias",
        ),
    ),
)  # fmt: skip
"""InternLM3: Llama with biases in all linear layers, or in none."""

MINISTRAL = relative(
    "Ministral", "ministral", "MinistralForCausalLM", windows=lambda layers: [SLIDING] * layers
)
"""Ministral: Mistral with a sliding window in all blocks or in some."""

CWM = relative(
    "CWM",
    "cwm",
    "CwmForCausalLM",
    biases=("mlp",),
    windows=lambda layers: [SLIDING if n % 4 else FULL for n in range(layers)],
    rope=False,
    read=lambda given, fields: scaled_by_default(given, fields, 16.0, 1e6),
    write=write_rope,
    requirements=(DIVISIBLE,),
    rewards=False,
)
"""CWM: Llama with a sliding window in three of every four blocks; the first of the four has
none."""


def _read_seed(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    in_output, in_qkv = given.flag("attention_out_bias"), fields["add_qkv_bias"]
    if in_output and not in_qkv:
        why = "attention_bias is False; the output can have a bias only with queries and keys"
        given.refuse("attention_out_bias", in_output, why)
    if not in_output:
        return {"add_bias_linear": False}
    whole = fields["add_mlp_bias"]
    return {
        "add_bias_linear": whole, "add_attention_bias": not whole, "add_mlp_bias": False,
        "add_qkv_bias": False,
    }  # fmt: skip


SEED_OSS = relative(
    "Seed-OSS",
    "seed_oss",
    "SeedOssForCausalLM",
    keys=SIZES | {"residual_dropout": "hidden_dropout"},
    biases=("qkv", "mlp"),
    features=("add_attention_bias",),
    all_biases=True,
    read=_read_seed,
    write=lambda model: {"attention_out_bias": model.attention.proj_bias},
)
"""Seed-OSS: Llama with separate keys for the biases of queries, keys and values, of the output and
of the MLP."""

HUNYUAN_NORMS = (
    *norm("attention.q_norm", "self_attn.query_layernorm"),
    *norm("attention.k_norm", "self_attn.key_layernorm"),
)
HUNYUAN_FIXED = {"qk_layernorm": True, "qk_layernorm_after_rope": True}


def read_alpha(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Read RoPE. Its dynamic ``alpha`` multiplies theta by alpha^(D / (D - 2)) for head width D."""
    content, width = given.content, fields["kv_channels"]
    form = content.get("rope_parameters") or content.get("rope_scaling") or {}
    alpha = form.get("alpha") if isinstance(form, dict) else None
    if not alpha:
        return read_rope(given, fields)
    if form.get("rope_type", form.get("type")) != "dynamic" or not isinstance(alpha, int | float):
        given.refuse("rope_scaling", form, "alpha must be a number, of dynamic scaling")
    given.unused("rope_parameters", "rope_scaling", "rope_theta")
    base = form.get("rope_theta") or content.get("rope_theta") or 10_000.0
    return {"rotary_base": base * alpha ** (width / (width - 2)), "rope_scaling": None}


def _read_hunyuan(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("use_qk_norm", (True, None), "queries and keys are always normalised")
    given.only("use_cla", (False, None), "blocks cannot share keys and values")
    given.only("norm_type", ("rms", None), "norms must be RMSNorm")
    given.unused("eod_token_id", "attention_head_dim", "cla_share_factor")
    return read_alpha(given, fields)


HUNYUAN_V1_DENSE = relative(
    "HunYuan",
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    relative_entries(HUNYUAN_NORMS),
    fixed=HUNYUAN_FIXED,
    biases=("attention",),
    rope=False,
    read=_read_hunyuan,
    write=write_rope,
)
"""HunYuan: Llama with query and key norms after the rotation."""


def _read_ernie(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("attention_dropout", (0, 0.0, None), "transformers has no dropout in such models")
    return {}


ERNIE4_5 = relative(
    "ERNIE 4.5",
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    relative_entries(qkv_form=INTERLEAVED_QKV),
    keys={key: field for key, field in SIZES.items() if key != "attention_dropout"}
    | {"use_bias": "add_bias_linear"},
    fixed={"attention_dropout": 0.0},
    all_biases=True,
    base=500_000.0,
    read=_read_ernie,
    rewards=False,
)
"""ERNIE 4.5: Llama whose RoPE pairs neighbouring channels of a head."""

HELIUM = relative(
    "Helium",
    "helium",
    "HeliumForCausalLM",
    relative_entries(qkv_form=INTERLEAVED_QKV),
    biases=("qkv", "mlp"),
    base=100_000.0,
    requirements=(
        Requirement(
            lambda m: m.attention.num_attention_heads * m.attention.kv_channels == m.hidden_size,
            "--num-attention-heads times --kv-channels equal to --hidden-size",
        ),
    ),
)
"""Helium: ERNIE 4.5 with optional biases on queries, keys and values, and on the MLP."""


def _read_smollm3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    layers, used = fields["num_layers"], given.flag("use_sliding_window")
    every, rotates = given.whole("no_rope_layer_interval"), given.content.get("no_rope_layers")
    given.unused("no_rope_layers")
    if rotates is None:
        rotates = [int((n + 1) % every != 0) for n in range(layers)]
    if not isinstance(rotates, list) or len(rotates) < layers or not set(rotates) <= {0, 1}:
        given.refuse("no_rope_layers", rotates, f"expected 0 or 1 for each of {layers} blocks")
    flags = without_rope(not each for each in rotates[:layers])
    window = given.optional_whole("sliding_window") if used else None
    if not used:
        given.unused("layer_types", "sliding_window")
        return flags | {"sliding_window": None}
    default = [FULL if window is None or each else SLIDING for each in rotates[:layers]]
    return flags | read_windows(given, window, default)


def _write_smollm3(model: ModelConfig) -> dict[str, Any]:
    local = model.attention.sliding_window is not None
    return {"no_rope_layers": [int(each) for each in rotating(model)], "use_sliding_window": local}


SMOLLM3 = relative(
    "SmolLM3",
    "smollm3",
    "SmolLM3ForCausalLM",
    biases=BIASES,
    features=("no_rope_freq",),
    base=2_000_000.0,
    windows=lambda layers: [FULL] * layers,
    reads_windows=False,
    read=_read_smollm3,
    write=_write_smollm3,
)
"""SmolLM3: Llama without RoPE in every fourth block."""


def _read_ministral3(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    form = given.content.get("rope_parameters") or given.content.get("rope_scaling")
    form = dict(form) if isinstance(form, dict) else {
        "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 16384, "beta_fast": 32.0, "beta_slow": 1.0,
        _BETA: 0.1,
    }  # fmt: skip
    beta, floor = form.pop(_BETA, None), form.get("original_max_position_embeddings")
    form.pop("max_position_embeddings", None)
    if not isinstance(beta, int | float) or isinstance(beta, bool) or beta < 0:
        given.refuse("rope_parameters", form | {_BETA: beta}, f"{_BETA} must be 0 or more")
    if not isinstance(floor, int) or isinstance(floor, bool) or floor < 1:
        given.refuse("rope_parameters", form, "original_max_position_embeddings must be positive")
    if form.get("rope_type", form.get("type")) in (None, "default", "linear"):
        # RoPE is not scaled; only the attention temperature depends on this length.
        del form["original_max_position_embeddings"]
    given.content = given.content | {"rope_parameters": form, "rope_scaling": None}
    flags = read_rope(given, fields)
    given.only("layer_types", ([SLIDING] * fields["num_layers"], None), "all blocks are alike")
    if beta:
        flags |= {"attention_temperature": float(beta), "attention_temperature_floor": floor,
                  "attention_temperature_rotary": True}  # fmt: skip
    return flags


_BETA = "llama_4_scaling_beta"


def _write_ministral3(model: ModelConfig) -> dict[str, Any]:
    keys, positions = write_rope(model), model.positions
    floor = positions.attention_temperature_floor
    form = {"original_max_position_embeddings": floor} | keys["rope_parameters"]
    return {"rope_parameters": form | {_BETA: positions.attention_temperature or 0.0}}


def _one_length(model: ModelConfig) -> bool:
    """Return whether the query factor and RoPE scaling start at the same sequence length, because
    config.json has a single key for it."""
    original = model.positions.rope_scaling.original_max_position_embeddings
    floor = model.positions.attention_temperature_floor
    return model.positions.attention_temperature is None or original in (None, floor)


MINISTRAL3 = relative(
    "Ministral 3",
    "ministral3",
    "Ministral3ForCausalLM",
    keys=SIZES | {"sliding_window": "sliding_window"},
    features=("attention_temperature", "attention_temperature_rotary"),
    rope=False,
    read=_read_ministral3,
    write=_write_ministral3,
    requirements=(
        Requirement(
            _one_length,
            "--attention-temperature-floor equal to original_max_position_embeddings of "
            "--rope-scaling",
        ),
        Requirement(
            lambda model: (
                (model.positions.attention_temperature is None)
                != model.positions.attention_temperature_rotary
            ),
            "--attention-temperature-rotary",
        ),
    ),
)
"""Ministral 3: Mistral whose queries are multiplied by a factor that grows with their position."""

BITNET = relative(
    "BitNet",
    "bitnet",
    "BitNetForCausalLM",
    relative_entries(
        norm("attention.sub_norm", "self_attn.attn_sub_norm"),
        norm("mlp.sub_norm", "mlp.ffn_sub_norm"),
    ),
    keys={key: field for key, field in SIZES.items() if key != "head_dim"},
    only_read=HEAD_DIM,
    fixed={"sub_norm": True},
    biases=("attention",),
    base=500_000.0,
    rewards=False,
)
"""BitNet: norms before the output projections of attention and MLP. Only its bfloat16 files, which
can be trained, are read; 2-bit files have a quantization_config, which is refused."""


_FIXED = {"apply_layernorm_1p": True, "scale_embeddings": True}


def _read_gemma1(given: HFConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    given.only("use_bidirectional_attention", (False, None), "attention must be causal")
    given.only(
        "hidden_activation", ("gelu_pytorch_tanh", None), "transformers reads hidden_act"
    )  # fmt: skip
    return {}


GEMMA = relative(
    "Gemma",
    "gemma",
    "GemmaForCausalLM",
    # Config files of the first releases say gelu, but transformers computes gelu_pytorch_tanh.
    fixed=_FIXED,
    activations={
        name: {"glu_activation": "geglu"} for name in ("gelu", "gelu_pytorch_tanh", "gelu_new")
    }
    | {"silu": {"glu_activation": "swiglu"}},
    biases=("attention",),
    read=_read_gemma1,
)

VAULTGEMMA = relative(
    "VaultGemma",
    "vaultgemma",
    "VaultGemmaForCausalLM",
    relative_entries(mlp_norm="pre_feedforward_layernorm"),
    keys=GEMMA2.keys,
    fixed=_FIXED,
    features=GEMMA2.features,
    requirements=GEMMA2.requirements,
    rope=False,
    read=lambda given, fields: {**read_gemma(given, fields, 2), **read_rope(given, fields)},
    write=lambda model: write_gemma(model) | write_rope(model),
    rewards=False,
)
