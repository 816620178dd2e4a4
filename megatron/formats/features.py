"""Features of networks beyond the plain pre-norm transformer, for other programs' formats. Also the
networks' parameters, and checks of the arguments that other trainers save.

Each format lists the features that it can express, so that other networks are refused instead of
written incorrectly. A saved argument must be read, be known not to change the network
(``harmless_names.txt``), or be refused by name. Trainers save hundreds of arguments, and forks add
more. An unknown argument is ignored if its value is that of a flag that was not given.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import translate
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.config import FLAG_CLASSES, LegacyFlags, ModelConfig, ModelFlags, ParallelConfig
from megatron.config.flags import flag_of
from megatron.config.run import FLAG_FIELDS
from megatron.families import spec_of
from megatron.formats.refused_flags import NETWORKS, OF_2019, REFUSED
from megatron.formats.universal_info import Registered, registered_parameters
from megatron.model.layer_list import LayerSpec, LayerStack
from megatron.parallel.mesh import Group
from megatron.parallel.shard import Shard
from megatron.parallel.tensor_parallel import TensorParallel

_FIELDS = {field.name: field for field in dataclasses.fields(ModelFlags)}
_NAMES = (
    "num_query_groups", "kv_channels", "add_qkv_bias", "add_attention_bias", "add_proj_bias",
    "add_mlp_bias",
    "position_embedding_offset", "rotary_percent", "rope_scaling", "rotary_base_local",
    "rotary_interleaved", "no_rope_freq", "attention_temperature", "attention_temperature_rotary",
    "sliding_window", "attention_chunk_size", "window_attn_skip_freq", "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "softmax_type", "attention_output_gate", "xielu", "glu_linear_offset",
    "activation_func_clamp_value",
    "final_logit_softcapping", "clip_qkv", "qk_layernorm", "qk_layernorm_whole",
    "qk_layernorm_per_head", "qk_layernorm_after_rope", "qk_l2_norm", "sub_norm",
    "apply_layernorm_1p", "embed_layernorm", "scale_embeddings", "embedding_multiplier",
    "logits_scaling", "residual_multiplier", "scale_head_input", "post_norm", "pre_norm",
    "first_norm", "relative_attention_per_block", "separate_decoder_embedding",
    "global_kv_channels", "global_num_query_groups", "global_keys_as_values", "value_norm",
    "block_scalar",
    "apply_residual_connection_post_layernorm", "parallel_residual", "shared_parallel_norm",
    "num_tokentypes", "lm_head_activation", "lm_head_bias", "head", "retro_add_retriever",
    "layer_experts", "multi_latent_attention", "mixers", "mtp_num_layers",
    "mtp_use_repeated_layer",
)  # fmt: skip
FEATURES = tuple(name for name in _NAMES if name in _FIELDS)
"""Features that a network may have: names of :class:`ModelFlags` fields, without those of deleted
packages."""

_PLAIN = {
    "num_query_groups": "--num-query-groups equal to --num-attention-heads",
    "kv_channels": "--num-attention-heads times --kv-channels equal to --hidden-size",
    "rotary_percent": "--rotary-percent 1.0",
    "head": "the head of a language model",
    "layer_experts": "no --num-experts",
    "mixers": "attention and an MLP in every layer",
}


class Requirement(NamedTuple):
    """Condition on a network, and the flags that satisfy it."""

    holds: Callable[[ModelConfig], bool]
    wanted: str


def features_of(model: ModelConfig) -> set[str]:
    """Return the members of :data:`FEATURES` that a network has."""
    flags, attention, positions = model.flags(), model.attention, model.positions
    heads, local = attention.num_attention_heads, attention.local is not None
    changed = {name for name in FEATURES if getattr(flags, name) != _FIELDS[name].default}
    has = {
        "num_query_groups": attention.num_query_groups != heads,
        "kv_channels": heads * attention.kv_channels != model.hidden_size,
        # These have no effect without rotary positions or without windowed blocks.
        "rotary_percent": positions.position_embedding_type == "rope",
        "rotary_interleaved": positions.position_embedding_type == "rope",
        "rotary_base_local": attention.sliding_window is not None,
        "window_attn_skip_freq": local,
    }
    return {name for name in changed if has.get(name, True)}


def without(feature: str) -> str:
    """Return the flags that a network without ``feature`` needs, as text for a message."""
    return _PLAIN.get(feature, f"no {flag_of(_FIELDS[feature])}")


def spelled(name: str, value: Any) -> str:
    """Return the flag that sets a :class:`ModelFlags` field to ``value``, as text for a message."""
    flag = flag_of(_FIELDS[name])
    if isinstance(value, bool):
        return flag if value != _FIELDS[name].default else f"no {flag}"
    return f"no {flag}" if value is None else f"{flag} {value}"


def layers_of(model: ModelConfig, size: int = 1, experts: str = "cut") -> list[LayerSpec]:
    """Return the layer list of a tensor-parallel rank, for a tensor-parallel size. For ``experts``
    see ``TensorParallel``."""
    return spec_of(model).layers(TensorParallel(Group(tuple(range(size))), experts=experts))


@lru_cache(maxsize=8)
def parameters_of(
    model: ModelConfig, size: int = 1, experts: str = "cut"
) -> dict[str, list[Registered]]:
    """Return the parameters that DeepSpeed engines register for a model at a tensor-parallel size,
    by canonical name."""
    return registered_parameters(layers_of(model, size, experts))


def whole_shards(model: ModelConfig) -> dict[str, Shard]:
    """Return the unpartitioned shard of each parameter and buffer, by canonical name. Raises
    TypeError, ValueError or RuntimeError if the configuration's sizes are impossible."""
    shards = {name: parts[0].shard for name, parts in parameters_of(model).items()}
    return shards | buffers_of(model)


@lru_cache(maxsize=8)
def buffers_of(model: ModelConfig) -> dict[str, Shard]:
    """Return the shard of each buffer of a model, by canonical name."""
    with torch.device("meta"):
        stack = LayerStack(layers_of(model), ParallelConfig())
    return {name: buffer.shard for name, buffer in stack.canonical_buffers()}


HARMLESS_ARGUMENTS = "MEGATRON_HARMLESS_ARGUMENTS"
"""Environment variable in which a user lists arguments that do not affect the network."""
_OFF = ("", "no_", "disable_", "use_")
"""Prefixes of flags that may be missing from, or added to, the argument's name."""
_VALUES = (bool, int, float, str, list, tuple, dict)


@cache
def harmless_names(section: str) -> tuple[str, ...]:
    """Return the names or patterns in a section of harmless_names.txt."""
    text = Path(__file__).with_name("harmless_names.txt").read_text()
    _, _, rest = text.partition(f"[{section}]\n")
    lines = rest.partition("\n[")[0].splitlines()
    return tuple(word for line in lines if not line.startswith("#") for word in line.split())


class SavedArguments(Mapping[str, Any]):
    """Saved arguments by name. The mapping records which of them have been read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content, self._read = content, set[str]()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def unused(self, *names: str) -> None:
        """Accept arguments without reading them, because the other arguments make them
        irrelevant."""
        self._read.update(names)

    def refuse(self, where: Path, network: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise CheckpointError if an argument in ``network`` is set, and not to one of the
        harmless values listed for it."""
        for name, harmless in network.items():
            value = self._content.get(name)
            if not (is_unset(value) or _is_one_of(value, harmless) or name in _named_harmless()):
                raise CheckpointError(
                    f"{where}: the network has {name} {value!r:.200}, which cannot be represented"
                )
        self._read.update(network)

    def refuse_the_rest(self, where: Path, remedy: str = "") -> None:
        """Raise CheckpointError if there are arguments that have not been read and may change the
        network. ``remedy`` is inserted into the message."""
        unknown = [
            f"{name} = {value!r:.100}"
            for name, value in self._content.items()
            if name not in self._read and not is_unset(value) and not is_harmless(str(name))
            if name not in _named_harmless()
        ]
        if unknown:
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            raise CheckpointError(
                f"{where}: the effect of {', '.join(unknown[:10])}{more} on the network is not "
                f"known; if it has none, {remedy}put the names into the environment variable "
                f"{HARMLESS_ARGUMENTS}"
            )


def _named_harmless() -> list[str]:
    return os.environ.get(HARMLESS_ARGUMENTS, "").replace(",", " ").split()


def is_unset(value: Any) -> bool:
    """Return whether a value is one that a flag has if it was not given: None, false, zero or
    empty."""
    return value is None or (isinstance(value, _VALUES) and not value)


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Return whether a value equals one in ``known``. Unlike Python, this distinguishes true from
    1."""
    kinds = isinstance(value, bool), isinstance(value, _VALUES)
    return any((isinstance(one, bool), True) == kinds and value == one for one in known)


def is_harmless(name: str) -> bool:
    """Return whether an argument is known not to change the network."""
    spellings = {f"{off}{name}" for off in _OFF} | {name.removeprefix("use_")}
    return name in _flags() or any(_harmless_pattern().match(spelled) for spelled in spellings)


@cache
def _harmless_pattern() -> re.Pattern[str]:
    """Return a pattern for the names of arguments that do not describe the network. These are
    arguments for training, arguments without effect unless another one is set (which is checked
    itself), and other trainers' flags."""
    flags = (flag for row in REFUSED | OF_2019 if row not in NETWORKS for flag in row.split())
    names = (flag.removeprefix("--").replace("-", "_") for flag in flags)
    return re.compile("|".join(map(translate, (*names, *harmless_names("saved arguments")))))


@cache
def _flags() -> frozenset[str]:
    """Return the argument names of flags that do not describe the network: this project's own, and
    other trainers' flags that it accepts without effect."""
    assert ModelFlags in FLAG_CLASSES and LegacyFlags in FLAG_CLASSES
    network = ModelFlags.__dataclass_fields__
    names = set()
    for field, _ in FLAG_FIELDS.values():
        if field.name in network:
            continue
        rows = (field.metadata["flag"], field.metadata["off"], *field.metadata["aliases"])
        flags = " ".join(filter(None, rows)).split()
        names |= {field.name, *(flag[2:].replace("-", "_") for flag in flags)}
    stripped = {name.removeprefix(off) for name in names for off in _OFF[1:]}
    return frozenset((names | stripped) - network.keys())
