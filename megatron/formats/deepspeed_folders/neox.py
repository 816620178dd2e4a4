"""Reading of GPT-NeoX models: their settings, which GPT-NeoX saves as YAML or JSON files next to
its checkpoints, and the names and row order of their parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_bytes
from megatron.checkpoint.source import resolved
from megatron.config import ModelConfig, ModelFlags
from megatron.formats.deepspeed_folders.naming import ForeignNaming
from megatron.formats.features import SavedArguments, harmless_names

_POSITIONS = {"rotary": "rope", "learned": "learned_absolute", "alibi": "alibi", "none": "none"}
_NORMS = {
    "layernorm": "LayerNorm",
    "te_layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "te_rmsnorm": "RMSNorm",
}
_EPSILONS = {"LayerNorm": ("layernorm_epsilon", 1e-5), "RMSNorm": ("rms_norm_epsilon", 1e-8)}
"""Name and default of the setting for each norm's epsilon."""


_HARMLESS: dict[str, tuple[Any, ...]] = {"model_arch": ("gpt2",), "moe_num_experts": (1,)}
_NETWORK = {
    name: _HARMLESS.get(name, ())
    for name in (
        "model_arch scale_embeddings small_emb use_mup moe_num_experts rotary_emb_interleaved "
        "sliding_window_width num_unique_layers opt_pos_emb_offset use_qk_layernorm "
        "apply_residual_connection_post_layernorm num_encoder_layers"
    ).split()
}
"""Settings that change the model in an unsupported way, each with the values, besides its default,
that are harmless."""

_ADDED_ONCE = (".proj.bias", ".down.bias")
_MLP = {
    "mlp.linear1": ("mlp.up", 0),
    "mlp.linear2": ("mlp.down", 0),
    "mlp.w1": ("mlp.up", 0),
    "mlp.w3": ("mlp.up", 1),
    "mlp.w2": ("mlp.down", 0),
}
"""Canonical name, and tensor index, of modules in a block whose names differ from Megatron's."""
_DOWN = re.compile(r".*\.mlp\.(?:linear2|dense_4h_to_h|w2)\.weight")


class StoredTensors(NamedTuple):
    """Tensors in a folder. ``names`` returns their names, and ``elements`` a tensor's number of
    elements over all tensor ranks. ``merged`` is True if another program has joined the ranks'
    shards."""

    names: Callable[[], Sequence[str]]
    elements: Callable[[str], int]
    merged: bool = False


class NeoXNaming(ForeignNaming):
    """Parameter names of GPT-NeoX, and how it shards parameters over ranks.

    With grouped query attention, each rank stores its rows as [queries, keys, values]. Files with
    the older MLP names store [queries, keys, values] for each query head, which gets a slice of the
    keys and values that it shares. Other attention is stored as in Megatron. Gated MLPs store the
    up projection before the gate, except in early Llama models, whose two matrices have separate
    names. With ``gpt_j_residual`` the biases after row-parallel layers are partial sums on each
    rank; otherwise all ranks have the same. Norms that differ between ranks are averaged, as in
    NeoX's converter.
    """

    def plain(self, name: str) -> str:
        return super().plain(name).removeprefix("sequential.")

    def unused(self, name: str) -> bool:
        # With gpt_j_tied the second norm is stored, but only the first one is used.
        second = self.model.shared_parallel_norm and ".post_attention_layernorm." in name
        return second or super().unused(name)

    def block(self, rest: str) -> tuple[str, int] | None:
        module, _, kind = rest.rpartition(".")
        kind = "weight" if kind == "scale" else kind  # NeoX's RMSNorm calls its weight scale
        if module in _MLP:
            canonical, part = _MLP[module]
            return f"{canonical}.{kind}", part
        return super().block(f"{module}.{kind}")

    def whole(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        if self._in_thirds(name):
            return self.join(name, "weight", [[parts[0].reshape(-1, *self.shapes[name][1:])]])
        values = super().whole(name, parts)
        if self.model.mlp.gated and ".mlp.up." in name and len(parts) == 1:
            return torch.cat(values.chunk(2)[::-1])
        return values

    def join(self, name: str, kind: str, shares: Sequence[Sequence[Tensor]]) -> Tensor:
        if not self._in_thirds(name):
            return super().join(name, kind, shares)
        (ranks,), attention = shares, self.model.attention
        heads = attention.num_attention_heads, *(attention.num_query_groups,) * 2
        sizes = [count // len(ranks) * attention.kv_channels for count in heads]
        if any(count % len(ranks) for count in heads) or any(
            share.shape[0] != sum(sizes) for share in ranks
        ):
            raise CheckpointError(
                f"{name} has {[share.shape[0] for share in ranks]} rows on its ranks, not "
                f"{sum(sizes)} each by the configuration"
            )
        count = heads[0] // len(ranks) if self._per_head() else 1
        of_one = [size // count for size in sizes]
        split = [share.float().unflatten(0, (count, -1)).split(of_one, 1) for share in ranks]
        return self.trim(
            name,
            torch.cat([part.flatten(0, 1) for parts in zip(*split, strict=True) for part in parts]),
        )

    def replicated(self, name: str, kind: str, ranks: Sequence[Tensor]) -> Tensor:
        if self.model.parallel_residual and kind == "weight" and name.endswith(_ADDED_ONCE):
            # Each partial sum's gradient is that of the sum, so all ranks have the moments of the
            # sum.
            return torch.stack([share.float() for share in ranks]).sum(0)
        if "norm" in name and any(not torch.equal(share, ranks[0]) for share in ranks):
            return torch.stack([share.float() for share in ranks]).mean(0)
        return ranks[0]

    def _in_thirds(self, name: str) -> bool:
        attention = self.model.attention
        grouped = attention.num_query_groups != attention.num_attention_heads
        return grouped and ".attention.qkv." in name

    def _per_head(self) -> bool:
        """Return whether keys and values are stored per query head, as GPT-NeoX did until November
        2024. Recognised by the older MLP names, which were used until July 2024."""
        return ".mlp.linear1." not in self.parts("layers.0.mlp.up.weight")[0]


def find_settings(folder: Path) -> dict[str, Any] | None:
    """Return all settings of a run, from the ``configs`` folder in or next to a checkpoint. Return
    None if it has no files. Raises CheckpointError if a file is malformed or PyYAML is missing."""
    for place in (folder / "configs", folder.parent / "configs"):
        files = sorted([*place.glob("*.yml"), *place.glob("*.yaml"), *place.glob("*.json")])
        if files:
            settings: dict[str, Any] = {}
            for file, name, value in ((f, *item) for f in files for item in _read(f).items()):
                known = settings.setdefault(str(name).replace("-", "_"), value)
                if known != value:
                    raise CheckpointError(
                        f"{file}: {name} is {value!r}, but {known!r} in another line of the files "
                        f"in {place}; remove the one that the run did not have"
                    )
            return settings
    return None


def _read(file: Path) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise CheckpointError(f"{file}: reading it needs PyYAML: pip install pyyaml") from None
    try:
        text = read_bytes(file).decode("utf-8")
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise CheckpointError(
                f"{file} has aliases (*name), of which a few lines make any amount of values; "
                "write the values themselves"
            )
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{file} cannot be read: {reason}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} has no settings")
    return content


def model_of(
    content: Mapping[str, Any], arguments: Any, folder: Path, tensors: StoredTensors
) -> ModelConfig:
    """Return the model that settings (by name with underscores) and tensors describe. ``arguments``
    is ``args`` from the model states, which contains the number of rows in the token embedding.
    Raises CheckpointError if a setting is missing, unknown or not supported."""
    settings = SavedArguments(content)
    settings.refuse(folder, _NETWORK)
    settings.unused(*harmless_names("settings of GPT-NeoX"))
    _check_layout(settings, folder, tensors)
    _check_attention(settings.get("attention_config"), folder)
    if isinstance(soft := settings.get("soft_prompt_tuning"), Mapping) and soft.get("enabled"):
        raise CheckpointError(f"{folder}: soft_prompt_tuning is enabled, which is not read")
    names = tensors.names()

    def number(name: str, *others: str) -> int:
        value = next((settings[n] for n in (name, *others) if settings.get(n) is not None), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{folder}: its configs have no {name} (or it is {value!r})")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    norm = _NORMS[_choice(settings, "norm", "layernorm", _NORMS, folder)]
    positions = _POSITIONS[_choice(settings, "pos_emb", "learned", _POSITIONS, folder)]
    residual = _switch(settings, "gpt_j_residual", folder)
    rows = settings.get("padded_vocab_size")
    if isinstance(arguments, Mapping):
        rows = arguments.get("padded_vocab_size", rows)
        _compare(settings, arguments, folder)
    if not isinstance(rows, int):
        raise CheckpointError(
            f"{folder}: the number of rows of the token embedding is not known; add "
            f"padded_vocab_size to a file in {folder / 'configs'}"
        )
    down = next((name for name in names if _DOWN.fullmatch(name)), None)
    epsilon, usual = _EPSILONS[norm]
    values: dict[str, Any] = {
        "num_layers": number("num_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden if down is None else tensors.elements(down) // hidden,
        "num_attention_heads": heads,
        "num_query_groups": number("num_kv_heads") if settings.get("num_kv_heads") else heads,
        "seq_length": number("seq_length"),
        "max_position_embeddings": number("max_position_embeddings", "seq_length"),
        "position_embedding_type": positions,
        "rotary_base": _real(settings, "rotary_emb_base", 10000.0, folder),
        "rotary_percent": _real(settings, "rotary_pct", 1.0, folder),
        "normalization": norm,
        "norm_epsilon": _real(settings, epsilon, usual, folder),
        "parallel_residual": residual,
        "shared_parallel_norm": residual and _switch(settings, "gpt_j_tied", folder),
        "untie_embeddings_and_output_weights": _switch(settings, "no_weight_tying", folder),
        "attention_dropout": _real(settings, "attention_dropout", 0.0, folder),
        "hidden_dropout": _real(settings, "hidden_dropout", 0.0, folder),
        "unpadded_vocab_size": rows,
        "padded_vocab_size": rows,
        **_activation(settings, names, folder),
        **_biases(settings, names, folder),
    }
    settings.refuse_the_rest(folder, f"remove it from the files in {folder / 'configs'}, or ")
    return resolved(ModelFlags(**values), folder)


def _choice(
    settings: Mapping[str, Any], name: str, default: str, known: Mapping[str, str], folder: Path
) -> str:
    value = settings.get(name) or default
    if not isinstance(value, str) or value not in known:
        raise CheckpointError(
            f"{folder}: the network has {name} {value!r}, which cannot be represented; known are "
            f"{', '.join(known)}"
        )
    return value


def _real(settings: Mapping[str, Any], name: str, default: float, folder: Path) -> float:
    value = settings.get(name)
    # YAML 1.1 reads 1e-5 as a string.
    try:
        return default if value is None else float(value)
    except (TypeError, ValueError):
        raise CheckpointError(f"{folder}: {name} is {value!r}, expected a number") from None


def _switch(settings: Mapping[str, Any], name: str, folder: Path, default: bool = False) -> bool:
    value = settings.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{folder}: {name} is {value!r}, expected true or false")
    return default if value is None else value


def _check_layout(settings: Mapping[str, Any], folder: Path, tensors: StoredTensors) -> None:
    """Raise CheckpointError if the tensor-parallel layout is one whose shards cannot be joined."""
    ranks = settings.get("model_parallel_size") or 1
    if ranks == 1:
        return
    if tensors.merged:
        raise CheckpointError(
            f"{folder}: the parts of {ranks} tensor ranks of GPT-NeoX were joined by a program "
            "that does not know their order; give the folder that the run saved"
        )
    if settings.get("output_layer_parallelism") == "row":
        raise CheckpointError(
            f"{folder}: the network has output_layer_parallelism 'row' over {ranks} tensor ranks, "
            "which cannot be represented"
        )


def _check_attention(layers: Any, folder: Path) -> None:
    """Raise CheckpointError unless all layers use full attention. A setting can list alternatives
    with a repeat count: ``[[["global", "flash"], 24]]``."""
    for entry in layers or [[["global"], "all"]]:
        names = entry[0] if isinstance(entry, list) and entry else entry
        for name in names if isinstance(names, list) else [names]:
            if name not in ("global", "flash"):
                raise CheckpointError(
                    f"{folder}: the network has attention {name!r}, which cannot be represented"
                )


def _compare(settings: Mapping[str, Any], arguments: Mapping[str, Any], folder: Path) -> None:
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if arguments.get(name) not in (None, settings.get(name)):
            raise CheckpointError(
                f"{folder}: its configs are of another run: {name} is {settings.get(name)!r} there "
                f"and {arguments[name]!r} in the model states"
            )


def _activation(settings: Mapping[str, Any], names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the model fields for the MLP's activation."""
    kind, form = settings.get("activation") or "gelu", settings.get("mlp_type") or "regular"
    # The fused GELU is the tanh approximation, as in Megatron. The unfused GELU is exact.
    fused = _switch(settings, "bias_gelu_fusion", folder)
    old = any(".mlp.dense_h_to_4h." in name for name in names)
    if form == "regular" and kind in ("gelu", "relu"):
        return {"relu": kind == "relu", "bias_gelu_fusion": kind == "relu" or fused}
    named = kind == "swiglu" and form in ("regular", "llama") and not old
    if named or (form == "llama" and kind in ("silu", "swish")):
        return {"glu_activation": "swiglu"}
    raise CheckpointError(
        f"{folder}: the network has activation {kind!r} with mlp_type {form!r}, which cannot be "
        "represented; known are gelu, relu and swiglu, and silu with mlp_type 'llama'"
    )


def _biases(settings: Mapping[str, Any], names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the model fields for biases, which are derived from the tensors."""
    if not _switch(settings, "use_bias_in_norms", folder, default=True):
        raise CheckpointError(
            f"{folder}: the network has use_bias_in_norms false, which cannot be represented"
        )
    attention = any(name.endswith(".attention.dense.bias") for name in names)
    mlp = any(re.search(r"\.mlp\.\w+\.bias$", name) for name in names)
    if not mlp and settings.get("gpt_j_residual"):
        raise CheckpointError(
            f"{folder}: the network has gpt_j_residual and MLPs without biases; GPT-NeoX leaves "
            "the attention out of it, which cannot be represented"
        )
    return {
        "add_bias_linear": mlp and attention,
        "add_attention_bias": attention and not mlp,
        "add_mlp_bias": mlp and not attention,
    }
