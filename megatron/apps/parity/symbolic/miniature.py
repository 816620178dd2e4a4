"""A small model with the layers and the layout of a large one.

Unsharded dimensions become a few elements, and sharded ones a few elements per rank. Layers, types
of blocks, mesh axes, schedule, partition and families are unchanged, so that every rank runs the
same program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.apps.parity.check import LEFT_OUT, OF_LAYOUTS, PRECISION
from megatron.config import RunConfig, Setting, Settings
from megatron.features.experts.flags import ExpertsConfig
from megatron.features.latent.flags import LatentConfig
from megatron.run.run import Run, run_of

MOST_RANKS = 256
"""Maximum number of ranks that are simulated with values. For a larger layout, the numbers of
replicas, expert-parallel ranks and context-parallel ranks are reduced."""
_HIDDEN, _HEAD, _WIDTH, _TOKENS, _ROWS, _FEWEST_ROWS = 16, 8, 4, 8, 8, 64
_BLOCKS = 2
_DATA = (
    "data_path", "train_data_path", "valid_data_path", "test_data_path", "data_cache_path",
    "tokenizer_model", "tokenizer_name_or_path", "vocab_file", "merge_file", "train_samples",
    "train_tokens", "train_epochs", "rampup_batch_size", "deepspeed_config", "split",
    "unpadded_vocab_size", "padded_vocab_size", "lr_decay_samples", "lr_decay_tokens",
    "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_iters", "lr_warmup_fraction",
    "use_checkpoint_args", "blend_sample_in_corpus",
)  # fmt: skip


@dataclass(frozen=True)
class Miniature:
    """The small model's runs.

    Attributes:
        run: run in the user's layout.
        plain: run on one process.
        ranks: number of ranks along each axis.
        changed: axes with fewer ranks than in the user's layout, each with the user's number and
          the reduced number.
    """

    run: Run
    plain: Run
    ranks: dict[str, int]
    changed: dict[str, tuple[int, int]]


def axes_of(config: RunConfig) -> dict[str, int]:
    """Return the number of ranks along every axis of the mesh."""
    axes = dict(config.parallel.axes)
    data = config.parallel.world_size // math.prod(axes.values())
    return {**axes, "data": data}


def fewer(axes: dict[str, int], most: int = MOST_RANKS) -> dict[str, int]:
    """Return axes with at most ``most`` ranks if possible. There are at most two replicas. The
    expert and context ranks are halved as needed, but not below two. Other axes are unchanged."""
    small = {**axes, "data": min(axes["data"], 2)}
    for axis in ("expert", "context", "expert", "context"):
        while math.prod(small.values()) > most and small[axis] > 2 and small[axis] % 2 == 0:
            small[axis] //= 2
    return small


def miniature(settings: Settings, run: Run, most: int = MOST_RANKS) -> Miniature:
    """Return the small model for ``run``. Raises ConfigError if a size cannot be reduced."""
    config = run.config
    axes = axes_of(config)
    small = fewer(axes, most)
    kept = {n: s for n, s in settings.items() if n not in LEFT_OUT and n not in _DATA}
    kept = {n: s for n, s in kept.items() if n not in PRECISION and n != "zero_stage"}
    sizes = _sizes(config, small)
    data = small["data"] * small["expert"]
    count = _micro_batches(config)
    micro = min(config.training.micro_batch_size, 2)
    sizes |= {
        "micro_batch_size": micro,
        "global_batch_size": micro * count * data,
        "train_iters": 2,
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        "num_workers": 0,
        "eval_iters": 0,
        **_dropout(config),
    }
    common = kept | {name: Setting(value, "check") for name, value in sizes.items()}
    experts = small["expert"] * (small["tensor"] if config.parallel.folded else 1)
    layout = common | {"zero_stage": Setting(config.engine.zero_stage, "check")}
    if small["context"] != axes["context"]:
        layout["context_parallel_size"] = Setting(small["context"], "check")
    if small["expert"] != axes["expert"]:
        layout["expert_model_parallel_size"] = Setting(experts, "check")
    plain = {n: s for n, s in common.items() if n not in OF_LAYOUTS | _PIPELINES}
    changed = {axis: (axes[axis], small[axis]) for axis in axes if small[axis] != axes[axis]}
    ranks = math.prod(small.values())
    return Miniature(run_of(layout, ranks), run_of(plain, 1), small, changed)


def _dropout(config: RunConfig) -> dict[str, float]:
    """Return the dropout rates, which are 0 where masks differ from those of one process."""
    same, model = config.layout().dropout, config.model
    return {
        "hidden_dropout": 0.0 if same == "none" else model.hidden_dropout,
        "attention_dropout": model.attention.attention_dropout if same == "all" else 0.0,
    }


_PIPELINES = {"pipeline_model_parallel_split_rank", "pipeline_partition"}


def _micro_batches(config: RunConfig) -> int:
    """Return the fewest micro batches for the schedule, but two if the user's step has several."""
    rounds = config.training.micro_batch_size * config.parallel.data_parallel_size
    full = max(1, config.training.global_batch_size // rounds)
    fewest = config.layout({}).fewest_micro_batches
    step = config.parallel.pipeline_model_parallel_size
    if config.parallel.pipeline_schedule == "interleaved":
        return max(step, fewest)
    return min(full, max(2, fewest))


def _sizes(config: RunConfig, ranks: dict[str, int]) -> dict[str, Any]:
    """Return values for all flags that set sizes."""
    model, tensor, context = config.model, ranks["tensor"], ranks["context"]
    attention = model.attention
    heads, groups = attention.num_attention_heads, attention.num_query_groups
    exchanging = context if any(k.startswith("a2a") for k in config.parallel.cp_comm_type) else 1
    unit = tensor * exchanging
    if groups == heads:
        small_heads = small_groups = unit * min(2, max(1, heads // unit))
    else:
        small_groups = groups if groups < tensor else tensor * min(groups // tensor, 2)
        small_heads = math.lcm(small_groups, unit)
        small_heads *= 2 if heads > small_heads else 1
    length = tensor * (2 * context if context > 1 else 1)
    length *= max(1, -(-_TOKENS // length))
    values: dict[str, Any] = {
        "hidden_size": _HIDDEN,
        "num_attention_heads": small_heads,
        "ffn_hidden_size": _WIDTH * tensor,
        "seq_length": length,
        "vocab_size": max(_FEWEST_ROWS, _ROWS * tensor) - 3,
        "make_vocab_size_divisible_by": _ROWS // 2,
    }
    if groups != heads:
        values["num_query_groups"] = small_groups
    if model.positions.position_embedding_type == "learned_absolute":
        values["max_position_embeddings"] = length
    if model.decoder_seq_length is not None:
        values["decoder_seq_length"] = length
    window = attention.sliding_window
    if window is not None:
        values["sliding_window"] = max(1, length // 2) if window < model.seq_length else length
    if attention.attention_chunk_size is not None:
        values["attention_chunk_size"] = max(1, length // 2)
    latent = model.part(LatentConfig)
    if latent.idle:
        values["kv_channels"] = _HEAD
    else:
        values |= {"kv_lora_rank": 6, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
        if latent.q_lora_rank is not None:
            values["q_lora_rank"] = 10
    values |= _layers(config)
    return values | _experts(model.part(ExpertsConfig), ranks, config.parallel.folded)


def _layers(config: RunConfig) -> dict[str, Any]:
    """Return flags for fewer blocks, or none if blocks differ. Each stage has up to two blocks. One
    more is added if the user's stages have different numbers of blocks. At least one dense block
    before blocks with experts is kept."""
    model, stages = config.model, config.parallel.stages
    counts = {"num_layers": model.num_layers}
    if model.decoder_num_layers is not None:
        counts["decoder_num_layers"] = model.decoder_num_layers
    experts = model.part(ExpertsConfig).layer_experts
    dense = next((n for n, count in enumerate(experts) if count), 0)
    if config.parallel.pipeline_partition not in ("blocks", "parameters"):
        return {}
    if len({*experts[dense:]}) > 1 or _different(config):
        return {}
    small: dict[str, Any] = {}
    for name, count in counts.items():
        each, over = divmod(count, stages)
        small[name] = stages * min(each, _BLOCKS) + bool(over) * (each >= _BLOCKS)
        small[name] = min(count, max(small[name], 2))
    if dense:
        front = min(dense, max(1, small["num_layers"] // 2))
        rest = small["num_layers"] - front
        small["moe_layer_freq"] = f"([0]*{front}+[1]*{rest})"
    return small


def _different(config: RunConfig) -> bool:
    """Return whether blocks differ in more than their experts."""
    attention, parallel = config.model.attention, config.parallel
    names = ("window_attn_skip_freq", "no_rope_freq", "block_scalar", "hybrid_layer_pattern")
    values = (getattr(part, name, None) for part in (config.model, attention) for name in names)
    several = len(parallel.cp_comm_type) > 1 or parallel.recompute_method == "block"
    return several or any(values) or config.model.family not in ("gpt", "bert", "t5")


def _experts(part: ExpertsConfig, ranks: dict[str, int], folded: bool) -> dict[str, Any]:
    if part.idle:
        return {}
    over = ranks["expert"] * (ranks["tensor"] if folded else 1)
    groups = part.moe_router_num_groups or 1
    k = part.moe_router_topk
    step = math.lcm(over, groups)
    chosen = part.moe_router_group_topk or groups
    most = max(part.counts)
    count = next(
        count
        for count in range(step, most + step, step)
        if count == most or (count // groups * chosen >= k and count > k)
    )
    values: dict[str, Any] = {"num_experts": (count,)}
    for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
        if getattr(part, name):
            values[name] = _WIDTH * ranks["tensor"]
    if part.moe_latent_size:
        values["moe_latent_size"] = _WIDTH
    return values
