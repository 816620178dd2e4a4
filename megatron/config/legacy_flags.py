"""Flags that are accepted from scripts of other trainers, and not used."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

from megatron.config.flags import option

_CACHE = "sample indices are in --data-cache-path"
_TIMES = '"wall_clock_breakdown" in the DeepSpeed JSON times the parts of a step'
_OVERLAP = '"overlap_comm" of zero_optimization in the DeepSpeed JSON does this'
_COMPILE = "fusion comes from --torch-compile"
_SCALES = "scales are computed from the current values"
_UNUSED = {
    "--use-distributed-optimizer": "DeepSpeed's ZeRO does this; set --zero-stage 1",
    "--DDP-impl local|torch|FSDP": "DeepSpeed's engine reduces the gradients",
    "--use-flash-attn --use-flash-attn-v2": "--attention-backend chooses the kernel",
    "--exit-signal-handler": "a run always saves and exits on SIGTERM, SIGINT and SIGUSR1",
    "--no-masked-softmax-fusion": "there is no separate softmax kernel",
    "--no-bias-dropout-fusion": _COMPILE,
    "--no-gradient-accumulation-fusion": "DeepSpeed's engine accumulates",
    "--attention-softmax-in-fp32": "the attention kernels accumulate their softmax in float32",
    "--no-query-key-layer-scaling": "attention scores are never scaled by the layer number",
    "--contiguous-checkpointing": "recomputed activations are not copied",
    "--use-cpu-initialization": "weights are always initialised on the CPU, equal for every layout",
    "--data-impl mmap|infer": "the memory-mapped .bin/.idx format is the only one",
    "--loose-json": "JSON files have one object per line in any case",
    "--data-efficiency-curriculum-learning": '"data_efficiency" in the DeepSpeed JSON is enough',
    "--return-data-index": "tools/show_batch.py says which samples a step had",
    "--train-idx-path STR": _CACHE,
    "--train-doc-idx-path STR": _CACHE,
    "--train-sample-idx-path STR": _CACHE,
    "--train-shuffle-idx-path STR": _CACHE,
    "--log-params-norm": "only the gradient norm is logged, always",
    "--log-num-zeros-in-grad": "zeros in gradients are not counted",
    "--log-throughput": "throughput is always logged",
    "--log-progress": "--metrics-file records the progress of a run",
    "--log-world-size-to-tensorboard": "checkpoints contain the number of processes",
    "--log-optimizer-states-to-tensorboard": "optimizer state is in the checkpoints only",
    "--timing-log-level INT": _TIMES,
    "--timing-log-option max|minmax|all": _TIMES,
    "--override-opt_param-scheduler --override-lr-scheduler": (
        "the schedules always follow the flags, also after a resume"
    ),
    "--partition-activations": "use --recompute-granularity",
    "--checkpoint-in-cpu": "activation checkpoints stay on the device",
    "--synchronize-each-layer": "the CPU never synchronizes after a layer",
    "--profile-backward": '"flops_profiler" in the DeepSpeed JSON profiles a step',
    "--no-async-tensor-model-parallel-allreduce": (
        "collectives of the backward pass always overlap its matrix products"
    ),
    "--overlap-grad-reduce": _OVERLAP,
    "--overlap-param-gather": _OVERLAP,
    "--no-persist-layer-norm": "the norms are torch's",
    "--no-rope-fusion": _COMPILE,
    "--fp8-margin INT": _SCALES,
    "--fp8-amax-history-len INT": _SCALES,
    "--fp8-amax-compute-algo most_recent|max": _SCALES,
    "--use-mcore-models": "there is one implementation of each model",
    "--transformer-impl local|transformer_engine": "there is one implementation",
    "--dataloader-type single|": "samples are read in one pass, in Megatron's order",
    "--mmap-warmup": "data files are read as they are needed",
    "--manual-gc": "Python collects garbage by itself",
    # 2019.
    "--resume-dataloader": "a resumed run always continues with the next sample",
    "--shuffle": "training samples are always shuffled, by --seed",
    "--deep-init": "output projections always start with the std / sqrt(2 x layers)",
    "--fp32-embedding --fp32-tokentypes": "the optimizer has float32 weights of every parameter",
    "--fp32-layernorm": "norms are computed in float32",
    "--save-all-rng --load-all-rng": "the random states of all ranks are saved and loaded",
    "--dataset-impl mmap|infer": "the memory-mapped .bin/.idx format is the only one",
    "--skip-mmap-warmup": "data files are read as they are needed",
    # OneFlow.
    "--multihead-attention-fusion": "queries, keys and values are one matrix product in any case",
    "--no-scale-tril-softmax-dropout-fusion": "--attention-backend chooses the kernel",
    "--use-rdma": "NCCL uses RDMA where it finds it",
    "--use-external-dataset": "data are always read in Megatron's format and sample order",
    "--metric-print-format normal|table": "log lines have one form; --metrics-file has the numbers",
    "--log STR": "the log is printed; --metrics-file and --tensorboard-dir write it to files",
    "--profile-transformer-layer": "--profile says where the time of a step goes",
    "--save-last": "the last iteration is always saved",
}
"""Flags that are accepted from scripts of other trainers, and what happens instead."""


def _unused(words: str, note: str) -> tuple[str, Any, Any]:
    """A field for ``make_dataclass``: a flag with its aliases, or with its value: INT, STR or
    choices with at least one ``|``."""
    flag, *others = words.split()
    name = flag[2:].replace("-", "_").lower()
    if others and not others[0].startswith("-"):
        kind = int if others[0] == "INT" else str
        choices = [word for word in others[0].split("|") if word] if "|" in others[0] else None
        return name, kind | None, option(None, flag=flag, choices=choices, note=note)
    if flag.startswith("--no-"):
        return name.removeprefix("no_"), bool, option(True, off=flag, note=note)
    return name, bool, option(False, flag=flag, aliases=others, note=note)


LegacyFlags = make_dataclass(
    "LegacyFlags",
    [_unused(words, note) for words, note in _UNUSED.items()],
    frozen=True,
    namespace={
        "__doc__": "Accepted from other trainers' scripts, and not used.",
        "__module__": __name__,
    },
)
