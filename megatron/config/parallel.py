"""How the work is laid out over processes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option
from megatron.config.layouts import SCHEDULES

LOGITS_CHUNK_MIB = {"cpu": 64, "cuda": 256}
"""What ``--logits-chunk-mib`` is unless it is given. Each chunk adds to the gradient of the token
table in float32, which weighs more beside the products of a GPU."""


@dataclass(frozen=True)
class ParallelConfig:
    """Layout: how the work is laid out over processes."""

    tensor_model_parallel_size: int = option(1, aliases=("--model-parallel-size",))
    """Processes that share each layer's matrices."""
    sequence_parallel: bool = option(False)
    """Split activations along the sequence between the tensor-parallel layers."""
    pipeline_model_parallel_size: int = option(1)
    """Processes that the layer list is cut over."""
    no_pipeline_parallel: bool = option(False)
    """State that the model runs as a plain module; an error together with more than one stage."""
    pipeline_schedule: str | None = option(
        None,
        choices=SCHEDULES,
        derived="interleaved with several stages per process, else 1f1b",
    )
    """Order in which a pipeline's processes work through the micro batches."""
    num_layers_per_virtual_pipeline_stage: int | None = option(None)
    """Blocks per stage of an interleaved pipeline; each process holds several stages."""
    num_virtual_stages_per_pipeline_rank: int | None = option(
        None,
        derived="num-layers / pipeline size / num-layers-per-virtual-pipeline-stage; else 2 with "
        "--pipeline-schedule interleaved or dualpipev, 1 without",
    )
    """Stages that each process of a pipeline holds."""
    pipeline_partition: str = option("blocks", aliases=("--pipe-partition-method",))
    """How the layer list is cut into stages: blocks (as many blocks in each, as far as that goes),
    parameters (as many parameters in each), or the number of blocks of each stage: 3,4,4,3."""
    recompute_activations: bool = option(False)
    """Short for --recompute-granularity selective."""
    recompute_granularity: str | None = option(None, choices=("selective", "full"))
    """What is computed again in the backward pass: attention only, or whole layers."""
    recompute_method: str | None = option(None, choices=("uniform", "block"))
    """With full granularity: every layer in chunks of --recompute-num-layers (uniform), or only the
    first --recompute-num-layers layers of each pipeline stage (block)."""
    recompute_num_layers: int = option(1)
    """Layers per recomputed chunk (uniform), or how many layers of a stage are recomputed (block).
    """
    logits_chunk_mib: int | None = option(None, derived="64 on a CPU, 256 on a GPU")
    """MiB of logits that a process holds at a time while it computes the loss; 0 for all of them.
    """
    checkpoint_activations: bool = option(False, aliases=("--deepspeed-activation-checkpointing",))
    """Older spelling of --recompute-granularity full --recompute-method uniform."""
    distributed_backend: str | None = option(
        None, choices=("nccl", "gloo"), derived="nccl on GPUs, gloo on CPU"
    )
    """Library that carries the collectives."""
    distributed_timeout_minutes: float = option(10.0)
    """Minutes after which a collective that has not finished is an error."""
    local_rank: int | None = option(
        None, flag="--local_rank", aliases=("--local-rank",), derived="environment LOCAL_RANK"
    )
    """Number of this process on its node; launchers pass it."""
    data_parallel_size: int = option(1, internal=True)
    """Replicas of the model: world size / (tensor x pipeline size)."""
    world_size: int = option(1, internal=True)
    """Number of processes."""

    @property
    def stages(self) -> int:
        """Stages of the pipeline, those that share a process included."""
        return self.pipeline_model_parallel_size * (self.num_virtual_stages_per_pipeline_rank or 1)
