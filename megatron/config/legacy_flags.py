"""Flags that are accepted from scripts of other trainers, and not used."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

from megatron.config.flags import option

_CACHE = "sample indices are in --data-cache-path"
_TIMES = '"wall_clock_breakdown" in the DeepSpeed JSON times the parts of a step'
_OVERLAP = '"overlap_comm" of zero_optimization in the DeepSpeed JSON does this'
_COMPILE = "fusion comes from --torch-compile"
_INTERVAL = "scales are computed in every step"
_SIGNALS = "a run always saves and exits on SIGTERM, SIGINT and SIGUSR1"
_DIVIDED = "--sequence-parallel divides the activations between blocks"
_STAGES = "the pipeline schedules decide when and how stages exchange activations"
_WRITING = "every rank writes its own share; --async-save writes while training continues"
_READING = "every rank reads its own share, in any layout"
_REPLICAS = "a checkpoint is written once, in --save"
_TENSOR = "collectives of the backward pass always overlap its matrix products"
_LOSS = "the loss is computed in chunks of --logits-chunk-mib, with its gradients"
_RANDOM = "dropout draws from one generator per process and purpose"
_GRADIENTS = "DeepSpeed's engine reduces gradients; zero_optimization in its JSON sets its buckets"
_PINNED = '"pin_memory" of offload_optimizer in the DeepSpeed JSON does this'
_OFFLOADED = "--cpu-offloading-num-layers moves activations, with two buffers in pinned memory"
_NCCL = "NCCL is set up by its environment variables"
_REMOTE = "data at s3:// and the like are read by fsspec, with or without it"
_GROUPED = "experts of a layer are one tensor, and grouped matrix products compute them"
_TOKENS = "tokens travel to the ranks of their experts and back in one exchange each way"
_UNUSED = {
    "--use-distributed-optimizer": "DeepSpeed's ZeRO does this, from --zero-stage 1 on",
    "--DDP-impl local|torch|FSDP": "DeepSpeed's engine reduces the gradients",
    "--use-flash-attn --use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton "
    "--use-flash-attn-builder": "--attention-backend chooses the kernel",
    "--exit-signal-handler": _SIGNALS,
    "--no-masked-softmax-fusion": "there is no separate softmax kernel",
    "--no-bias-dropout-fusion": _COMPILE,
    "--no-gradient-accumulation-fusion": "DeepSpeed's engine accumulates",
    "--attention-softmax-in-fp32": "the attention kernels accumulate their softmax in float32",
    "--apply-query-key-layer-scaling": (
        "the kernels do not overflow in float16 without it, and its results are the same"
    ),
    "--fp16-lm-cross-entropy": "the loss is always computed in float32",
    "--no-query-key-layer-scaling": "attention scores are never scaled by the layer number",
    "--contiguous-checkpointing --contigious-checkpointing": (
        "recomputed activations are not copied"
    ),
    "--data-parallel-random-init": (
        "all data-parallel ranks start with the weights of --seed, as after Megatron's broadcast "
        "from the first; their dropout masks differ in any case"
    ),
    "--onnx-safe STR": (
        "training computes the same with it; tools/convert_checkpoint.py to-hf makes models that "
        "other programs export"
    ),
    "--use-cpu-initialization": "weights are always initialised on the CPU, equal for every layout",
    "--data-impl mmap|infer": "the memory-mapped .bin/.idx format is the only one",
    "--loose-json": "JSON files have one object per line in any case",
    "--data-efficiency-curriculum-learning": '"data_efficiency" in the DeepSpeed JSON is enough',
    "--return-data-index": (
        "tools/analyze_data.py always records the numbers of samples, and tools/show_batch.py says "
        "which a step had"
    ),
    "--train-idx-path STR": _CACHE,
    "--train-desc-path STR": _CACHE,
    "--train-doc-idx-path STR": _CACHE,
    "--train-sample-idx-path STR": _CACHE,
    "--train-shuffle-idx-path STR": _CACHE,
    "--log-throughput": "throughput is always logged",
    "--log-energy": "energy is always logged where counters of devices or processors can be read",
    "--log-progress": "--metrics-file records the progress of a run",
    "--timing-log-option max|minmax|all": _TIMES,
    "--override-opt_param-scheduler --override-opt-param-scheduler --override-lr-scheduler": (
        "the schedules always follow the flags, also after a resume"
    ),
    "--partition-activations": "use --recompute-granularity",
    "--split-transformers": "use --recompute-granularity",
    "--synchronize-each-layer": "the CPU never synchronizes after a layer",
    "--profile-backward": '"flops_profiler" in the DeepSpeed JSON profiles a step',
    "--no-async-tensor-model-parallel-allreduce": _TENSOR,
    "--overlap-grad-reduce": _OVERLAP,
    "--overlap-param-gather": _OVERLAP,
    "--no-persist-layer-norm": "the norms are torch's",
    "--no-rope-fusion": _COMPILE,
    "--use-mcore-models": "there is one implementation of each model",
    "--transformer-impl local|transformer_engine": "there is one implementation",
    "--mmap-warmup": "data files are read as they are needed",
    "--manual-gc": "Python collects garbage by itself",
    "--cpu-offloading-activations": _OFFLOADED,
    "--cpu-offloading-double-buffering": _OFFLOADED,
    "--cpu-offloading-retain-pinned-cpu-buffers": _OFFLOADED,
    # Megatron-LM and Megatron-DeepSpeed of 2023.
    "--adlr-autoresume": _SIGNALS,
    "--adlr-autoresume-interval INT": _SIGNALS,
    "--distribute-saved-activations --distribute-checkpointed-activations": _DIVIDED,
    "--no-contiguous-buffers-in-local-ddp": "DeepSpeed's engine holds the gradients",
    "--no-scatter-gather-tensors-in-pipeline": _STAGES,
    "--overlap-p2p-communication": _STAGES,
    "--use-ring-exchange-p2p": _STAGES,
    "--no-barrier-with-level-1-timing": _TIMES,
    "--empty-unused-memory-level 0|1|2": (
        "the allocator keeps its memory; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True limits "
        "fragmentation"
    ),
    "--no-initialization": "weights are initialised before a checkpoint's replace them",
    "--torch_adam --cpu_torch_adam --ds_fused_adam": "Adam is torch's, fused on GPUs and CPUs",
    "--disable-mem-efficient-ln": "the norms are torch's",
    "--fp8-interval INT": _INTERVAL,
    "--no-delay-grad-reduce": "DeepSpeed's engine reduces the gradients",
    "--repeated-dataloader": "data are repeated as often as a run needs",
    "--trust-remote-code": "a tokenizer with code of its own is refused in any case",
    "--checkpoint-io-buffer-size INT": _WRITING,
    "--checkpoint-data-parallel STR": _WRITING,
    "--aio-intra-op-parallelism INT": _WRITING,
    "--checkpoint-writer-decoupled": _WRITING,
    # Megatron-LM of now.
    "--no-overlap-p2p-communication": _STAGES,
    "--overlap-p2p-communication-warmup-flush": _STAGES,
    "--microbatch-group-size-per-virtual-pipeline-stage INT": _STAGES,
    "--exit-signal-handler-for-training --exit-signal-handler-for-dataloader": _SIGNALS,
    "--manual-gc-interval INT": "Python collects garbage by itself",
    "--no-manual-gc-eval --disable-manual-gc-eval": "Python collects garbage by itself",
    "--no-bias-swiglu-fusion": _COMPILE,
    "--use-fused-weighted-squared-relu": _COMPILE,
    "--fused-residual-rmsnorm": _COMPILE,
    "--use-transformer-engine-op-fuser": _COMPILE,
    "--use-te-activation-func": _COMPILE,
    "--disable-jit-fuser": _COMPILE,
    "--cross-entropy-loss-fusion": _LOSS,
    "--cross-entropy-fusion-impl native|te": _LOSS,
    "--defer-embedding-wgrad-compute": _LOSS,
    "--wgrad-deferral-limit INT": _LOSS,
    "--delay-wgrad-compute": "the pipeline schedules decide when gradients of weights are computed",
    "--tp-comm-overlap": _TENSOR,
    "--tp-comm-overlap-cfg STR": _TENSOR,
    "--tp-comm-bootstrap-backend nccl|mpi|gloo": _TENSOR,
    "--no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad": _TENSOR,
    "--no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad": _TENSOR,
    "--no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag": _TENSOR,
    "--no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs": _TENSOR,
    "--tp-comm-overlap-rs-dgrad": _TENSOR,
    "--no-tp-comm-split-ag --disable-tp-comm-split-ag": _TENSOR,
    "--no-tp-comm-split-rs --disable-tp-comm-split-rs": _TENSOR,
    "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding": _DIVIDED,
    "--flash-attention-version 2|3|4": "--attention-backend chooses the kernel",
    "--te-rng-tracker": _RANDOM,
    "--train-sync-interval INT": "the CPU waits for the device only where it needs a number",
    "--logging-level INT": "log messages have one level",
    "--no-align-grad-reduce --disable-align-grad-reduce": _GRADIENTS,
    "--no-align-param-gather": _GRADIENTS,
    "--overlap-param-gather-with-optimizer-step": _GRADIENTS,
    "--ddp-num-buckets INT": _GRADIENTS,
    "--ddp-bucket-size INT": _GRADIENTS,
    "--ddp-pad-buckets-for-high-nccl-busbw": _GRADIENTS,
    "--ddp-average-in-collective": _GRADIENTS,
    "--no-gradient-reduce-div-fusion": _GRADIENTS,
    "--no-use-layer-wise-param-layout": _GRADIENTS,
    "--create-all-gather-group": _GRADIENTS,
    "--no-pin-cpu-grads": _PINNED,
    "--no-pin-cpu-params": _PINNED,
    "--nccl-communicator-config-path STR": _NCCL,
    "--use-sharp": _NCCL,
    "--sharp-enabled-group dp|dp_replica": _NCCL,
    "--use-nccl-ub": _NCCL,
    "--disable-symmetric-registration": _NCCL,
    "--high-priority-stream-groups STR+": _NCCL,
    "--disable-gloo-process-groups": "process groups have the backend of --distributed-backend",
    "--auto-detect-ckpt-format": "--load recognises the format",
    "--async-strategy nvrx|mcore": _WRITING,
    "--use-persistent-ckpt-worker": _WRITING,
    "--async-ckpt-cpu-priority INT": _WRITING,
    "--async-ckpt-io-priority INT": _WRITING,
    "--async-ckpt-use-cpu-shm": _WRITING,
    "--dist-ckpt-workers INT": _WRITING,
    "--no-ckpt-fully-parallel-save": _WRITING,
    "--ckpt-fully-parallel-save": _WRITING,
    "--ckpt-fully-parallel-save-process-group dp|ep_dp": _WRITING,
    "--ckpt-assume-constant-structure": _WRITING,
    "--dist-ckpt-optim-fully-reshardable": _READING,
    "--distrib-optim-fully-reshardable-mem-efficient": _READING,
    "--ckpt-fully-parallel-load": _READING,
    "--ckpt-fully-parallel-load-exchange-algo broadcast|gather_rounds|gather_object": _READING,
    "--ckpt-fully-parallel-load-process-group dp|ep_dp": _READING,
    "--no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity": (
        "a checkpoint is always checked when it is loaded"
    ),
    "--no-stream-ckpt-dequant --disable-stream-ckpt-dequant": _READING,
    "--verify-integrity": "a checkpoint is always checked when it is loaded",
    "--replication": _REPLICAS,
    "--replication-jump INT": _REPLICAS,
    "--no-mmap-bin-files": "data files are memory-mapped, and read as they are needed",
    "--no-create-attention-mask-in-dataloader": "attention masks are made where they are used",
    "--num-dataset-builder-threads INT": _CACHE,
    "--enable-msc": _REMOTE,
    "--disable-msc": _REMOTE,
    # Of layers with states.
    "--is-hybrid-model": "--hybrid-layer-pattern says which layers there are",
    "--disable-mamba-mem-eff-path": "the backward pass computes states again",
    # Of mixture of experts.
    "--create-moe-param-group": "parameters say themselves that they are of experts",
    "--use-tutel": _GROUPED,
    "--moe-grouped-gemm": _GROUPED,
    "--moe-use-legacy-grouped-gemm": _GROUPED,
    "--moe-single-grouped-weight --moe-single-grouped-bias": _GROUPED,
    "--moe-permute-fusion": _GROUPED,
    "--moe-router-fusion": _COMPILE,
    "--use-grouped-gemm-for-shared-expert": "shared experts are one MLP",
    "--use-grouped-gemm-for-dense-mlp": "a dense MLP has one product for each of its matrices",
    "--moe-token-dispatcher-type allgather|alltoall|flex|alltoall_seq": _TOKENS,
    "--moe-enable-deepep": _TOKENS,
    "--moe-flex-dispatcher-backend deepep|hybridep|ncclep": _TOKENS,
    "--moe-flex-dispatcher-num-sms INT": _TOKENS,
    "--moe-deepep-num-sms INT": _TOKENS,
    "--moe-hybridep-num-sms INT": _TOKENS,
    "--moe-shared-expert-overlap": "shared experts are computed while tokens travel",
    "--overlap-moe-expert-parallel-comm": "shared experts are computed while tokens travel",
    "--moe-pad-expert-input-to-capacity": "an expert computes the tokens that it has, no padding",
    "--moe-router-padding-for-quantization --moe-router-padding-for-fp8": (
        "kernels that need a multiple of rows pad them"
    ),
    "--moe-per-layer-logging": "the log and --metrics-file have figures of every layer",
    # 2019.
    "--resume-dataloader": "a resumed run always continues with the next sample",
    "--shuffle": "training samples are always shuffled, by --seed",
    "--deep-init": "output projections start with --init-method-std / sqrt(2 x layers)",
    "--fp32-embedding --fp32-tokentypes --embedding-weights-in-fp32": (
        "the optimizer has float32 weights of every parameter; a step uses them rounded to the "
        "dtype of training"
    ),
    "--fp32-layernorm": "norms are computed in float32, from weights in the dtype of training",
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
    """A field for ``make_dataclass``: a flag with its aliases, or with its value: INT, FLOAT, STR
    or choices with at least one ``|``."""
    flag, *others = words.split()
    name = flag[2:].replace("-", "_").lower()
    if others and not others[0].startswith("-"):
        if others[0] == "STR+":
            return name, tuple[str, ...], option((), flag=flag, note=note)
        kind = {"INT": int, "FLOAT": float}.get(others[0], str)
        choices = [word for word in others[0].split("|") if word] if "|" in others[0] else None
        return name, kind | None, option(None, flag=flag, choices=choices, note=note)
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
