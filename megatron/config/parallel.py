"""Resolved parallel layout: how a run is distributed over processes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.axes import ParallelFlags, check_partition, pipeline_schedule
from megatron.config.flags import ConfigResolver, shared
from megatron.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Distribution of a run over processes.

    ``recompute_granularity`` and ``recompute_method`` are None if nothing is recomputed;
    ``logits_chunk_mib``, ``distributed_backend`` and ``local_rank`` are None if device and launcher
    decide. ``expert_axis`` is the size of the mesh's ``expert`` axis, which is a subset of the
    data-parallel ranks. With ``folded``, experts are sharded over the ``expert`` and ``tensor``
    axes together. ``expert_tensor_parallel_size`` is None if experts are sharded like other layers,
    else 1. ``cp_comm_type`` is the context-parallel communication, for all blocks or per block
    (empty without it); ``hierarchical_context_parallel_sizes`` is empty without ``a2a+p2p``.
    """

    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_schedule: str = "1f1b"
    num_virtual_stages_per_pipeline_rank: int = 1
    pipeline_partition: str = "blocks"
    recompute_granularity: str | None = None
    recompute_modules: tuple[str, ...] = ()
    recompute_method: str | None = None
    recompute_num_layers: int = 1
    logits_chunk_mib: int | None = None
    distributed_backend: str | None = None
    distributed_timeout_minutes: float = 10.0
    local_rank: int | None = None
    data_parallel_size: int = 1
    world_size: int = 1
    expert_axis: int = 1
    folded: bool = False
    context_parallel_size: int = 1
    cp_comm_type: tuple[str, ...] = ()
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()

    @property
    def experts_over_tensor(self) -> str:
        """Sharding of experts over tensor-parallel ranks: ``folded``, ``cut`` or ``whole``, as in
        :class:`~megatron.parallel.tensor_parallel.TensorParallel`."""
        if self.folded:
            return "folded"
        return "cut" if self.expert_tensor_parallel_size is None else "whole"

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh's axes, except ``data``, which takes the remaining processes."""
        return {
            "pipeline": self.pipeline_model_parallel_size,
            "context": self.context_parallel_size,
            "expert": self.expert_axis,
            "tensor": self.tensor_model_parallel_size,
        }

    @property
    def length_divisor(self) -> int:
        """Number that must divide every sequence length: with ``sequence_parallel`` each
        tensor-parallel rank has an equal slice, and each context-parallel rank has two."""
        slices = self.tensor_model_parallel_size if self.sequence_parallel else 1
        return slices * (2 * self.context_parallel_size if self.context_parallel_size > 1 else 1)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipeline_model_parallel_size * self.num_virtual_stages_per_pipeline_rank

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Modules of each layer that are recomputed, as in ``--recompute-modules``."""
        selective = self.recompute_granularity == "selective"
        return (self.recompute_modules or ("core_attn",)) if selective else ()

    @property
    def recomputed(self) -> tuple[str | None, int | None]:
        """Kind of recomputation (``selective``, of attention; ``uniform``; ``block``; or None), and
        the number of recomputed blocks (None for all)."""
        if self.recompute_granularity != "full":
            return "selective" if "core_attn" in self.recomputed_modules else None, None
        if self.recompute_method == "block":
            return "block", self.stages * self.recompute_num_layers
        return "uniform", None

    def in_words(self) -> str:
        """Return a one-line description of the layout for users."""
        pipeline, data = self.pipeline_model_parallel_size, self.data_parallel_size
        words = [
            "1 process" if self.world_size == 1 else f"{self.world_size} processes",
            f"pipeline x data x tensor = {pipeline} x {data} x {self.tensor_model_parallel_size}",
        ]
        if pipeline > 1:
            chunks = self.num_virtual_stages_per_pipeline_rank
            words.append(f"{self.pipeline_schedule} with {chunks} stages per process")
        if self.sequence_parallel:
            words.append("sequence parallel")
        if self.context_parallel_size > 1:
            kinds = " ".join(self.cp_comm_type)
            words.append(f"sequences divided over {self.context_parallel_size} ({kinds})")
        if self.expert_model_parallel_size > 1:
            words.append(f"experts divided over {self.expert_model_parallel_size}")
        return ", ".join(words)


def resolve_parallel(
    flags: ParallelFlags, model: ModelConfig, world_size: int, resolver: ConfigResolver
) -> ParallelConfig:
    """Resolve the layout for ``world_size`` processes. Raises ConfigError on contradictions."""
    context = flags.context_size(resolver)
    replicas = _replicas(flags, model, context, world_size, resolver)
    kinds, levels = flags.communication(model, context, resolver)
    schedule, chunks = pipeline_schedule(flags, model, resolver)
    check_partition(flags, model, flags.pipeline_model_parallel_size * chunks, resolver)
    partition = flags.partition(model, chunks, resolver)
    granularity, method = _recompute(flags, resolver)
    return ParallelConfig(
        **shared(flags, ParallelConfig)
        | {
            "context_parallel_size": context,
            "cp_comm_type": kinds,
            "hierarchical_context_parallel_sizes": levels,
            "data_parallel_size": replicas,
            "world_size": resolver.put("world_size", world_size, "launcher"),
            "pipeline_schedule": schedule,
            "pipeline_partition": partition,
            "num_virtual_stages_per_pipeline_rank": chunks,
            "recompute_granularity": granularity,
            "recompute_method": method,
        }
        | flags.experts(replicas, resolver)
    )


def _replicas(
    flags: ParallelFlags,
    model: ModelConfig,
    context: int,
    world_size: int,
    resolver: ConfigResolver,
) -> int:
    tensor, pipeline = "tensor_model_parallel_size", "pipeline_model_parallel_size"
    resolver.check(
        not (flags.no_pipeline_parallel and flags.pipeline_model_parallel_size > 1),
        f"--no-pipeline-parallel contradicts {resolver.show(pipeline)}",
    )
    size = flags.tensor_model_parallel_size
    together = size * flags.pipeline_model_parallel_size * context
    sizes = [tensor, pipeline, *(["context_parallel_size"] if context > 1 else [])]
    resolver.check(
        world_size % together == 0,
        f"{' x '.join(map(resolver.show, sizes))} must divide the number of "
        f"processes, {world_size}; start a multiple of {together} processes, or choose other "
        "sizes",
    )
    for name in ("num_attention_heads", "ffn_hidden_size"):
        resolver.check_divides(tensor, name)
    groups = model.attention.num_query_groups
    resolver.check(
        groups % size == 0 or size % groups == 0,
        f"{resolver.show('num_query_groups')} and {resolver.show(tensor)}: one must be a multiple "
        "of the other, so that every process holds whole key and value heads",
    )
    if flags.sequence_parallel:
        resolver.check_divides(tensor, "seq_length")
        if model.decoder_seq_length is not None:
            resolver.check_divides(tensor, "decoder_seq_length")
    how = "processes / (tensor x pipeline x context)"
    return resolver.put("data_parallel_size", world_size // together, how)


def _recompute(flags: ParallelFlags, resolver: ConfigResolver) -> tuple[str | None, str | None]:
    granularity, method = flags.recomputation(resolver)
    if granularity == "full":
        return granularity, resolver.fill(
            "recompute_method", method, "uniform", "full recomputation"
        )
    for name in ("recompute_method", "recompute_num_layers"):
        resolver.check(
            not resolver.given(name), f"{resolver.show(name)} needs --recompute-granularity full"
        )
    return granularity, None
