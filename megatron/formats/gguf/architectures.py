"""llama.cpp's architectures: how their metadata and tensors map to those of `transformers`, whose
tables describe our models. The facts are from llama.cpp's convert_hf_to_gguf.py and the constants
of the package gguf, which also provides the tensor names.

Shapes: D head width, E experts, F inner width of the MLP, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.config import ModelConfig
from megatron.formats.gguf.container import Content, Keys
from megatron.formats.gguf.rope import (
    read_factors,
    read_longrope,
    read_scaling,
    write_factors,
    write_longrope,
    write_scaling,
)
from megatron.formats.huggingface.entries import GROUPED_QKV, INTERLEAVED

Values = Callable[[Tensor, ModelConfig], Tensor]


class ValueChange(NamedTuple):
    """Conversion of a tensor's values between a GGUF file and `transformers`."""

    write: Values
    read: Values


def _identity(values: Tensor, model: ModelConfig) -> Tensor:
    return values


SAME = ValueChange(_identity, _identity)
PAIRS = ValueChange(
    lambda values, model: INTERLEAVED.to_hf(values, model)[0],
    lambda values, model: INTERLEAVED.from_hf([values], model),
)
"""Permute the output rows of the query and key projections so that RoPE rotates adjacent channels,
as in Meta's checkpoints."""
SPLIT = ValueChange(
    lambda values, model: GROUPED_QKV.from_hf([values], model),
    lambda values, model: GROUPED_QKV.to_hf(values, model)[0],
)
"""Store all queries, then all keys, then all values, instead of group by group."""
PLUS_ONE = ValueChange(lambda values, _: values + 1, lambda values, _: values.float() - 1)
"""Store 1 + weight, since llama.cpp's norms multiply by the stored weight itself."""
TURNED = ValueChange(lambda values, _: values.mT, lambda values, _: values.mT)
"""Store [outputs, inputs] instead of the [inputs, outputs] of transformers' Conv1D."""
FLAT = ValueChange(lambda values, _: values.squeeze(0), lambda values, _: values.unsqueeze(0))
"""Store [H] instead of [1, H]."""

PAIRED = {r"blk\.\d+\.attn_[qk]\.(weight|bias)": PAIRS}
_SPLIT = {r"blk\.\d+\.attn_qkv\.(weight|bias)": SPLIT}
SHIFTED = {r".*norm\.weight": PLUS_ONE}

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
LLAMA_KEYS = SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_EXPERTS = LLAMA_KEYS | {
    "expert_feed_forward_length": "moe_intermediate_size", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
SILU = {"hidden_act": "silu"}


class Split(NamedTuple):
    """A tensor of `transformers` that is stored as two tensors in GGUF files.

    Attributes:
        names: what replaces the key of :attr:`Kind.splits` in the names of the two tensors.
        write: splits the tensor of `transformers`.
        read: joins the two tensors.
    """

    names: tuple[str, str]
    write: Callable[[Tensor], Sequence[Tensor]]
    read: Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Kind:
    """An architecture of llama.cpp.

    Attributes:
        name: value of ``general.architecture``, and the prefix of metadata keys.
        model_types: model types of `transformers` that are written as this architecture. Files are
            read as the first one, unless ``read`` returns another.
        keys: keys of config.json, by the metadata key, without prefix, that means the same.
        fixed: further keys of config.json, which have the same value in every model.
        read: returns further keys of config.json, from the metadata and what was read so far.
        write: returns further metadata, from config.json.
        changes: conversions of tensor values, by pattern for the tensor's name in the file.
        names: replacements in tensor names of `transformers` that gguf's table lacks.
        extra: returns tensors for what `transformers` stores in its configuration.
        repeats_head: True if llama.cpp requires a head tensor even if the head is tied.
        splits: tensors of `transformers` that are two tensors in the file, by substring of the
            name.
    """

    name: str
    model_types: tuple[str, ...]
    keys: Mapping[str, str]
    fixed: Content = field(default_factory=dict)
    read: Callable[[Keys, Content], Content] = lambda given, content: {}
    write: Callable[[Content], Content] = lambda content: {}
    changes: Mapping[str, ValueChange] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    extra: Callable[[Content], Mapping[str, Tensor]] = lambda content: {}
    repeats_head: bool = False
    splits: Mapping[str, Split] = field(default_factory=dict)

    def config(self, given: Keys) -> Content:
        """Return a model's config.json, given its metadata. Raises CheckpointError if a key is
        missing or malformed, or has an unknown effect."""
        content: Content = {"model_type": self.model_types[0]}
        for key, name in self.keys.items():
            is_size = not key.endswith(("epsilon", "residual"))
            if key == "attention.head_count_kv":  # defaults to the number of query heads
                given.get(key, 0)
                content[name] = given.get(key, given.whole("attention.head_count"))
            else:
                content[name] = given.whole(key) if is_size else given.require(key)
        if given.whole("block_count") > len(given.tensors):
            given.refuse("block_count", f"the file has {len(given.tensors)} tensors")
        content |= self.fixed
        content |= self.read(given, content)
        given.refuse_the_rest()
        return content

    def metadata(self, content: Content) -> Content:
        """Return the metadata for a model's config.json, with prefixed keys."""
        values = {key: content[name] for key, name in self.keys.items()} | self.write(content)
        return {f"{self.name}.{key}": value for key, value in values.items() if value is not None}

    def places(self, theirs: str, blocks: int) -> tuple[TensorPlace, ...]:
        """Return where the file stores a tensor of `transformers`: one place, or two if it is
        split. Raises CheckpointError if the package gguf has no name for the tensor."""
        key = self._split(theirs)
        if key is None:
            return (self._place(theirs, blocks),)
        names = self.splits[key].names
        return tuple(self._place(theirs.replace(key, name), blocks) for name in names)

    def _split(self, theirs: str) -> str | None:
        return next((key for key in self.splits if key in theirs), None)

    def _place(self, theirs: str, blocks: int) -> TensorPlace:
        renamed = theirs
        for part, known in self.names.items():
            renamed = renamed.replace(part, known)
        if not renamed.endswith((".weight", ".bias")):
            renamed += ".weight"
        name, _, suffix = renamed.rpartition(".")
        expert = re.search(r"(?:(?<=\.experts)(?:\.norms)?|\.norms)\.(\d+)(?=\.|\Z)", name)
        if expert is not None:
            name = name[: expert.start()] + name[expert.end() :]
        stored = _names_of(self.name, blocks).get_name(name)
        if stored is None:
            raise CheckpointError(f"GGUF files of {self.name} have no tensor {theirs}")
        return TensorPlace(f"{stored}.{suffix}", None if expert is None else int(expert[1]))

    def to_file(self, theirs: str, values: Tensor, model: ModelConfig) -> dict[TensorPlace, Tensor]:
        """Convert a tensor of `transformers` to the tensors in the file, by place."""
        key, places = self._split(theirs), self.places(theirs, model.num_layers)
        parts = (values,) if key is None else self.splits[key].write(values)
        return {
            place: self.change(place.name).write(part, model)
            for place, part in zip(places, parts, strict=True)
        }

    def from_file(
        self, theirs: str, read: Callable[[TensorPlace], Tensor], model: ModelConfig
    ) -> Tensor:
        """Return a tensor of `transformers`, which is converted from the file. ``read`` returns the
        tensor at a place."""
        key, places = self._split(theirs), self.places(theirs, model.num_layers)
        parts = [self.change(place.name).read(read(place), model) for place in places]
        return parts[0] if key is None else self.splits[key].read(parts)

    def change(self, name: str) -> ValueChange:
        """Return the conversion of a tensor's values, given its name in the file."""
        known = (each for form, each in self.changes.items() if re.fullmatch(form, name))
        return next(known, SAME)


class TensorPlace(NamedTuple):
    """Name of a tensor in a GGUF file, and the index of an expert if the tensor stacks all
    experts."""

    name: str
    expert: int | None


@cache
def _names_of(name: str, blocks: int) -> Any:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = {each: kind for kind, each in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(known[name], blocks)


def usual_width(content: Content) -> int:
    """Return the head width of a model whose config.json does not specify one."""
    return max(1, content["hidden_size"] // content["num_attention_heads"])


def read_head(given: Keys, content: Content, default: int | None = None) -> Content:
    """Return the head width, which by default is ``default`` or derived from the hidden size.
    Raises CheckpointError unless values are as wide as keys and RoPE rotates whole heads."""
    width = given.get("attention.key_length", default or usual_width(content))
    given.only("attention.value_length", width)
    given.only("rope.dimension_count", width)
    return {"head_dim": width}


def read_rope(given: Keys, content: Content, base: float = 10_000.0) -> Content:
    """Return the RoPE settings for heads of ``head_dim`` channels."""
    theta = given.get("rope.freq_base", base)
    scaling = read_scaling(given) or read_factors(given, content | {"rope_theta": theta})
    return {"rope_theta": theta, **({"rope_scaling": scaling} if scaling else {})}


def _read_llama(given: Keys, content: Content) -> Content:
    content |= read_head(given, content)
    content |= read_rope(given, content)
    experts = given.get("expert_count", 0)
    if experts:
        return content | {
            "model_type": "mixtral", "num_local_experts": experts, "sliding_window": None,
            "num_experts_per_tok": given.whole("expert_used_count"),
        }  # fmt: skip
    given.only("expert_used_count", 0)
    return content | {
        "attention_bias": "blk.0.attn_q.bias" in given.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in given.tensors,
    }


def write_head(content: Content) -> Content:
    """Return the metadata that :func:`read_head_and_rope` reads."""
    width = content.get("head_dim") or usual_width(content)
    return {
        "attention.key_length": width, "attention.value_length": width,
        "rope.dimension_count": width, "rope.freq_base": float(content["rope_theta"]),
        **write_scaling(content),
    }  # fmt: skip


def _write_llama(content: Content) -> Content:
    experts = content.get("num_local_experts")
    used = content.get("num_experts_per_tok") if experts else None
    return {**write_head(content), "expert_count": experts, "expert_used_count": used}


LLAMA = Kind(
    "llama", ("llama", "mistral", "mixtral"), LLAMA_KEYS, SILU, _read_llama, _write_llama, PAIRED,
    {"model.layers": "layers", "block_sparse_moe": "feed_forward"}, write_factors,
)  # fmt: skip


def read_head_and_rope(given: Keys, content: Content) -> Content:
    """Return the head width, for RoPE that rotates whole heads, and the RoPE settings."""
    head = read_head(given, content)
    return {**head, **read_rope(given, content | head)}


_NO_WINDOW = {"use_sliding_window": False, "sliding_window": None}
QWEN2 = Kind("qwen2", ("qwen2",), LLAMA_KEYS, SILU | _NO_WINDOW, read_head_and_rope, write_head)
QWEN3 = Kind("qwen3", ("qwen3",), LLAMA_KEYS, QWEN2.fixed, read_head_and_rope, write_head)


def _read_phi3(given: Keys, content: Content) -> Content:
    width = usual_width(content)
    rotated = given.get("rope.dimension_count", width)
    original = given.get("rope.scaling.original_context_length", content["max_position_embeddings"])
    scaling = read_longrope(given)
    return {
        "rope_theta": given.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotated / width,
        "sliding_window": given.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        **({"rope_scaling": scaling} if scaling else {}),
    }


def _write_phi3(content: Content) -> Content:
    return {
        "rope.dimension_count": int(content["partial_rotary_factor"] * usual_width(content)),
        "rope.freq_base": float(content["rope_theta"]),
        "rope.scaling.original_context_length": content["original_max_position_embeddings"],
        "attention.sliding_window": content["sliding_window"] or 0,
        **write_longrope(content),
    }


PHI3 = Kind(
    "phi3", ("phi3",), LLAMA_KEYS, SILU, _read_phi3, _write_phi3, extra=write_factors,
)  # fmt: skip


def _read_gemma(given: Keys, content: Content, widest: int, every: int) -> Content:
    """Return settings that llama.cpp does not store: every N-th block has no window, and only the
    largest model, with ``widest`` blocks, scales scores by the hidden size divided by the heads."""
    width = read_head(given, content, 256)["head_dim"]
    hidden, heads, layers = (
        content[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    kinds = [
        "sliding_attention" if (n + 1) % every else "full_attention" for n in range(int(layers))
    ]
    return {
        "head_dim": width,
        "query_pre_attn_scalar": hidden // heads if layers == widest else width,
        "sliding_window": given.whole("attention.sliding_window"),
        "layer_types": kinds,
    }


def _read_gemma2(given: Keys, content: Content) -> Content:
    return {
        **(gemma := _read_gemma(given, content, 46, 2)), **read_rope(given, content | gemma),
        "attn_logit_softcapping": given.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": given.get("final_logit_softcapping", 30.0),
    }  # fmt: skip


def _read_gemma3(given: Keys, content: Content) -> Content:
    gemma = _read_gemma(given, content, 62, 6)
    rope = read_rope(given, content | gemma, 1_000_000.0)
    return {
        **gemma, "sliding_window_pattern": 6, **rope,
        "rope_local_base_freq": given.get("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
    }  # fmt: skip


def _write_gemma(content: Content) -> Content:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **write_head(content), "attention.sliding_window": content["sliding_window"],
        **{name: content.get(name) for name in names},
    }  # fmt: skip


_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
GEMMA2 = Kind("gemma2", ("gemma2",), LLAMA_KEYS, _GEMMA, _read_gemma2, _write_gemma, SHIFTED)
GEMMA3 = Kind("gemma3", ("gemma3_text",), LLAMA_KEYS, _GEMMA, _read_gemma3, _write_gemma, SHIFTED)


GPT2 = Kind(
    "gpt2", ("gpt2",),
    {"context_length": "n_positions", "embedding_length": "n_embd", "block_count": "n_layer",
     "feed_forward_length": "n_inner", "attention.head_count": "n_head",
     "attention.layer_norm_epsilon": "layer_norm_epsilon"},
    {"activation_function": "gelu_new"},
    lambda given, content: {"n_inner": given.whole("feed_forward_length")},
    lambda content: {"feed_forward_length": content["n_inner"] or 4 * content["n_embd"]},
    changes={r"blk\.\d+\.(attn_qkv|attn_output|ffn_up|ffn_down)\.weight": TURNED},
)  # fmt: skip
_LAYER_NORM = SIZES | {"attention.layer_norm_epsilon": "layer_norm_eps"}
GPT_NEOX = Kind(
    "gptneox", ("gpt_neox",), _LAYER_NORM | {"use_parallel_residual": "use_parallel_residual"},
    {"hidden_act": "gelu"},
    lambda given, content: {
        "rotary_emb_base": given.get("rope.freq_base", 10_000.0),
        "rotary_pct": given.whole("rope.dimension_count") / usual_width(content),
    },
    lambda content: {
        "rope.dimension_count": int(
            content["rotary_pct"] * usual_width(content)
        ),
        "rope.freq_base": float(content["rotary_emb_base"]),
    },
    changes=_SPLIT,
    repeats_head=True,
)  # fmt: skip


def _read_falcon(given: Keys, content: Content) -> Content:
    """Return Falcon's settings. Its newer form has separate norms for attention and MLP, or GQA."""
    groups = given.get("attention.head_count_kv", 1)
    new = "blk.0.attn_norm_2.weight" in given.tensors
    new |= groups not in (1, content["num_attention_heads"])
    given.only("rope.dimension_count", usual_width(content))
    return {
        "rope_theta": given.get("rope.freq_base", 10_000.0),
        "num_kv_heads": groups, "new_decoder_architecture": new, "multi_query": new or groups == 1,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in given.tensors else None,
    }  # fmt: skip


FALCON = Kind(
    "falcon", ("falcon",),
    {**{key: name for key, name in SIZES.items() if key != "feed_forward_length"},
     "feed_forward_length": "ffn_hidden_size",
     "attention.layer_norm_epsilon": "layer_norm_epsilon"},
    {"activation": "gelu", "bias": False, "parallel_attn": True, "alibi": False},
    _read_falcon,
    lambda content: {
        "attention.head_count_kv": content["num_kv_heads"]
        if content["new_decoder_architecture"] or not content["multi_query"] else 1,
        "rope.freq_base": float(content["rope_theta"]),
    },
    changes=_SPLIT,
)  # fmt: skip
BLOOM = Kind(
    "bloom", ("bloom",),
    {"context_length": "seq_length", "embedding_length": "hidden_size", "block_count": "n_layer",
     "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon"},
    read=lambda given, content: {"n_inner": given.get("feed_forward_length"), **_alibi(given)},
    write=lambda content: {
        "feed_forward_length": 4 * content["hidden_size"],
        "attention.head_count_kv": content["n_head"], "attention.max_alibi_bias": 8.0,
    },
    changes=_SPLIT,
    names={"transformer.": ""},
)  # fmt: skip


def _alibi(given: Keys) -> Content:
    given.only("attention.head_count_kv", given.get("attention.head_count"))
    given.only("attention.max_alibi_bias", 8.0)
    return {}


def _read_qwen_experts(given: Keys, content: Content) -> Content:
    shared = given.get("expert_shared_feed_forward_length")
    return {
        **read_head_and_rope(given, content),
        **({} if shared is None else {"shared_expert_intermediate_size": shared}),
    }  # fmt: skip


_QWEN_EXPERTS = SILU | _NO_WINDOW | {"decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2_MOE = Kind(
    "qwen2moe", ("qwen2_moe",), _EXPERTS, _QWEN_EXPERTS | {"norm_topk_prob": False},
    _read_qwen_experts,
    lambda content: write_head(content) | {
        "expert_shared_feed_forward_length": content["shared_expert_intermediate_size"],
    },
    {r".*\.ffn_gate_inp_shexp\.weight": FLAT},
)  # fmt: skip
QWEN3_MOE = Kind(
    "qwen3moe", ("qwen3_moe",), _EXPERTS, _QWEN_EXPERTS | {"norm_topk_prob": True},
    _read_qwen_experts, write_head,
)  # fmt: skip
CLASSIC = (
    LLAMA, QWEN2, QWEN3, PHI3, GEMMA2, GEMMA3, GPT2, GPT_NEOX, FALCON, BLOOM, QWEN2_MOE, QWEN3_MOE,
)  # fmt: skip
