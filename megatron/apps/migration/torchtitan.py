"""Rules of torchtitan's keys that are more than a name (``tables/torchtitan.txt``).

Sizes of its models are those of torchtitan 0.2 (torchtitan/models/*/__init__.py). Its schedule has
the rate (k + 1) / W of the peak in step k of a warm-up of W steps, and falls until one step after
the last.
"""

from __future__ import annotations

from typing import Any

from megatron.apps.migration.rules import rules_of
from megatron.apps.migration.translation import Translation

_LLAMA: dict[str, dict[str, Any]] = {
    "debugmodel": {"dim": 256, "layers": 6, "heads": 16, "groups": 16, "ffn": 768, "vocab": 2048},
    "8B": {"dim": 4096, "layers": 32, "heads": 32, "groups": 8, "ffn": 14336, "vocab": 128256},
    "70B": {"dim": 8192, "layers": 80, "heads": 64, "groups": 8, "ffn": 28672, "vocab": 128256},
    "405B": {"dim": 16384, "layers": 126, "heads": 128, "groups": 8, "ffn": 53248, "vocab": 128256},
}
_QWEN: dict[str, dict[str, Any]] = {
    "0.6B": {"dim": 1024, "layers": 28, "heads": 16, "groups": 8, "ffn": 3072, "tied": True},
    "1.7B": {"dim": 2048, "layers": 28, "heads": 16, "groups": 8, "ffn": 6144, "tied": True},
    "4B": {"dim": 2560, "layers": 36, "heads": 32, "groups": 8, "ffn": 9728, "tied": True},
    "8B": {"dim": 4096, "layers": 36, "heads": 32, "groups": 8, "ffn": 12288},
    "14B": {"dim": 5120, "layers": 40, "heads": 40, "groups": 8, "ffn": 17408},
    "32B": {"dim": 5120, "layers": 64, "heads": 64, "groups": 8, "ffn": 25600},
}
_SCHEDULES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "ZBVZeroBubble": "dualpipev_zb",
    "DualPipeV": "dualpipev",
}


def model(t: Translation) -> None:
    name, flavor = t.get("model.name", "llama3"), str(t.get("model.flavor", "debugmodel"))
    sizes = {"llama3": _LLAMA, "qwen3": _QWEN}.get(name, {}).get(flavor)
    if sizes is None:
        t.lose(
            "model.name model.flavor",
            f"sizes of {name} {flavor} are not known here: give the flags of the network, or "
            "--pretrained-checkpoint with the config.json of the model and "
            "--use-checkpoint-args",
        )
        return
    key = "model.flavor model.name"
    for flag, value in (
        ("--num-layers", sizes["layers"]),
        ("--hidden-size", sizes["dim"]),
        ("--num-attention-heads", sizes["heads"]),
        ("--num-query-groups", sizes["groups"]),
        ("--ffn-hidden-size", sizes["ffn"]),
        ("--rotary-base", 1000000 if name == "qwen3" else 500000),
        ("--norm-epsilon", 1e-6 if name == "qwen3" else 1e-5),
    ):
        t.put(key, flag, value)
    if name == "qwen3":
        t.put(key, "--kv-channels", 128)
        t.put(key, "--qk-layernorm")
    else:
        t.put(key, "--use-rope-scaling")
    t.put(key, "--untie-embeddings-and-output-weights", not sizes.get("tied", False))
    t.put(key, "--normalization", "RMSNorm")
    t.put(key, "--position-embedding-type", "rope")
    t.put(key, "--swiglu")
    t.put(key, "--disable-bias-linear")
    t.put(key, "--attention-dropout", 0)
    t.put(key, "--hidden-dropout", 0)


def tokenizer(t: Translation) -> None:
    path = t.get("model.hf_assets_path", t.get("model.tokenizer_path", "./tests/assets/tokenizer"))
    folder = str(path).removesuffix("/original/tokenizer.model")
    keys = "model.hf_assets_path model.tokenizer_path"
    t.put(keys, "--tokenizer-type", "HFTokenizer")
    t.put(keys, "--tokenizer-model", folder)


def converters(t: Translation) -> None:
    names = t.get("model.converters", [])
    names = names.split(",") if isinstance(names, str) else names
    known = [name for name in names if name in ("float8", "quantize.linear.float8")]
    if known:
        t.put("model.converters", "--fp8-format", "e4m3")
    others = [name for name in names if name not in known]
    if others:
        t.lose("model.converters", f"{', '.join(others)}: only float8 has a counterpart")
    t.harmless("model.converters", "nothing is converted")


def _degree(t: Translation, name: str, default: int) -> int:
    return int(t.get(f"parallelism.{name}", t.get(f"training.{name}", default)))


def data_parallel(t: Translation) -> None:
    copies, shards = (
        _degree(t, "data_parallel_replicate_degree", 1),
        _degree(t, "data_parallel_shard_degree", -1),
    )
    keys = [
        f"{s}.data_parallel_{n}_degree"
        for s in ("parallelism", "training")
        for n in ("shard", "replicate")
    ]
    if shards != 1:
        t.put([keys[0], keys[2]], "--zero-stage", 3)
        if copies > 1:
            t.lose(
                [keys[1], keys[3]],
                "weights are divided over all replicas; zero_hpz_partition_size keeps gathers "
                "in a node",
            )
    else:
        t.put([keys[0], keys[2]], "--zero-stage", 0)
    if shards > 0:
        others = ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree")
        t.processes = copies * shards
        for name in others:
            t.processes *= _degree(t, name, 1)
    t.harmless(keys, "replicas are what is left of the processes")


def tensor(t: Translation) -> None:
    size = _degree(t, "tensor_parallel_degree", 1)
    keys = "parallelism.tensor_parallel_degree training.tensor_parallel_degree"
    if size > 1:
        t.put(keys, "--tensor-model-parallel-size", size)
        t.put(keys, "--sequence-parallel")
    t.harmless(keys, "1 is none")


def pipeline_schedule(t: Translation) -> None:
    key = "parallelism.pipeline_parallel_schedule"
    name = t.get(key, "1F1B")
    if _degree(t, "pipeline_parallel_degree", 1) < 2:
        t.harmless(key, "there is no pipeline")
    elif name in _SCHEDULES:
        t.put(key, "--pipeline-schedule", _SCHEDULES[name])
    else:
        t.lose(
            key,
            f"there is no {name}: --pipeline-schedule has 1f1b, interleaved, zbh1, dualpipev "
            "and dualpipev_zb",
        )


def microbatch(t: Translation) -> None:
    """In a pipeline ``local_batch_size`` is a replica's batch, which is cut into micro batches."""
    key, local = "parallelism.pipeline_parallel_microbatch_size", "training.local_batch_size"
    if _degree(t, "pipeline_parallel_degree", 1) > 1:
        size, batch = int(t.get(key, 1)), int(t.get(local, t.get("training.batch_size", 8)))
        t.put(key, "--micro-batch-size", size)
        if t.get("training.global_batch_size", -1) > 0:
            t.harmless(
                f"{local} training.batch_size", "global_batch_size and the micro batch say it"
            )
        else:
            t.put(f"{local} training.batch_size", "--num-accumulation-steps", batch // size)
    t.harmless(key, "there is no pipeline")


def batch(t: Translation) -> None:
    whole = t.get("training.global_batch_size", -1)
    if whole > 0:
        t.put("training.global_batch_size", "--global-batch-size", whole)
    t.harmless("training.global_batch_size", "-1: the micro batches of all replicas")


def data(t: Translation) -> None:
    name, path = t.get("training.dataset", "c4_test"), t.get("training.dataset_path")
    validates = t.get("validation.enable", t.get("validation.enabled")) and t.get(
        "validation.dataset_path"
    )
    if path:
        t.put("training.dataset_path", "--train-data-path" if validates else "--data-path", path)
        t.put("training.dataset_path", "--lazy-loader")
        t.harmless("training.dataset", "the path says it")
    else:
        t.lose(
            "training.dataset",
            f"nothing is downloaded: give the files of {name} to --data-path, or tokenize them "
            "with tools/preprocess_data.py",
        )


def precision(t: Translation) -> None:
    kind = t.get("training.mixed_precision_param", "bfloat16")
    if kind == "bfloat16":
        t.put("training.mixed_precision_param", "--bf16")
        t.put("reductions", "--accumulate-allreduce-grads-in-fp32")
    t.harmless(
        "training.mixed_precision_param training.mixed_precision_reduce",
        "gradients are summed in float32",
    )
    if t.get("training.dtype", "float32") == "float32":
        t.harmless("training.dtype", "main weights are float32")
    t.lose(
        "training.dtype", "main weights are float32 here; --main-params-dtype bf16 keeps fewer bits"
    )


def offload(t: Translation) -> None:
    if t.get("training.enable_cpu_offload"):
        for section in ("offload_param", "offload_optimizer"):
            t.put_json("training.enable_cpu_offload", f"zero_optimization.{section}.device", "cpu")
    t.harmless("training.enable_cpu_offload", "it is off")


def decay(t: Translation) -> None:
    key = "optimizer.weight_decay"
    t.put(key, "--weight-decay", t.get(key, 0.1), note="norms are decayed there, not here")


def schedule(t: Translation) -> None:
    """Exactly torchtitan's rates: a warm-up of W - 1 steps from 1 / W of the peak, a last part."""
    peak, steps = float(t.get("optimizer.lr", 8e-4)), int(t.get("training.steps", 10000))
    warmup = int(t.get("lr_scheduler.warmup_steps", 200))
    ratio, kind = t.get("lr_scheduler.decay_ratio"), t.get("lr_scheduler.decay_type", "linear")
    least = t.get("lr_scheduler.min_lr_factor", t.get("lr_scheduler.lr_min", 0.0))
    total = int(t.get("lr_scheduler.total_steps", steps))
    warmup = min(warmup, total)
    falls = min(round(total * float(ratio)) if ratio is not None else total, total - warmup)
    key = "lr_scheduler."
    if warmup > 1:
        t.put(f"{key}warmup_steps", "--lr-warmup-iters", warmup - 1)
        t.put(f"{key}warmup_steps", "--lr-warmup-init", float(f"{peak / warmup:.10g}"))
    t.harmless(f"{key}warmup_steps", "the first step has the whole rate")
    if falls <= 0:
        t.put(f"{key}decay_ratio {key}decay_type", "--lr-decay-style", "constant")
    else:
        t.put(f"{key}decay_ratio", "--lr-decay-style", "WSD")
        t.put(f"{key}decay_ratio", "--lr-wsd-decay-iters", falls)
        t.put(f"{key}decay_type", "--lr-wsd-decay-style", {"sqrt": "minus_sqrt"}.get(kind, kind))
        if total != steps:
            t.put(f"{key}total_steps", "--lr-decay-iters", total)
    if least:
        t.put(f"{key}min_lr_factor {key}lr_min", "--min-lr", float(f"{peak * float(least):.10g}"))
    t.harmless(
        f"{key}min_lr_factor {key}lr_min {key}decay_ratio {key}decay_type",
        "it is 0, the default, or without effect",
    )
    t.harmless(f"{key}total_steps", "it is the length of the run")


def folder(t: Translation) -> None:
    keys = "checkpoint.enable checkpoint.enable_checkpoint checkpoint.folder job.dump_folder"
    dump, name = t.get("job.dump_folder", "./outputs"), t.get("checkpoint.folder", "checkpoint")
    if t.get("checkpoint.enable", t.get("checkpoint.enable_checkpoint", False)):
        t.put(keys, "--save", f"{dump}/{name}")
        t.put(keys, "--load", f"{dump}/{name}")
        t.put("checkpoint.interval", "--save-interval", t.get("checkpoint.interval", 500))
    t.harmless(f"{keys} checkpoint.interval", "nothing is saved")


def keep(t: Translation) -> None:
    if t.get("checkpoint.keep_latest_k", 10) and t.has("--save"):
        t.put("checkpoint.keep_latest_k", "--keep-last", t.get("checkpoint.keep_latest_k", 10))
    t.harmless("checkpoint.keep_latest_k", "all are kept, or none is saved")


def asynchronous(t: Translation) -> None:
    if t.get("checkpoint.async_mode") in ("async", "async_with_pinned_mem"):
        t.put("checkpoint.async_mode", "--async-save")
    t.harmless("checkpoint.async_mode", "it is off")


def initial(t: Translation) -> None:
    path = t.get("checkpoint.initial_load_path")
    if path:
        whole = t.get("checkpoint.initial_load_model_only", True) is False
        t.words.pop("--load", None) if whole else None
        t.put(
            "checkpoint.initial_load_path checkpoint.initial_load_model_only",
            "--load" if whole else "--pretrained-checkpoint",
            path,
        )
    t.harmless(
        "checkpoint.initial_load_path checkpoint.initial_load_in_hf "
        "checkpoint.initial_load_model_only",
        "formats are recognised",
    )


def step(t: Translation) -> None:
    if int(t.get("checkpoint.load_step", -1)) >= 0 and t.has("--load"):
        t.put("checkpoint.load_step", "--load-tag", f"step-{t.get('checkpoint.load_step')}")
    t.harmless("checkpoint.load_step", "-1 is the newest, and a new folder has none")


def recompute(t: Translation) -> None:
    mode = t.get("activation_checkpoint.mode", "selective")
    keys = "activation_checkpoint.mode activation_checkpoint.selective_ac_option"
    if mode == "full":
        t.put("activation_checkpoint.mode", "--recompute-granularity", "full")
        t.put("activation_checkpoint.mode", "--recompute-method", "uniform")
    elif mode == "selective":
        t.put("activation_checkpoint.mode", "--recompute-granularity", "selective")
        t.harmless(
            keys,
            "which activations are kept changes no result; --activation-memory-budget F keeps "
            "a share",
        )
    elif mode == "memory_budget":
        budget = t.get("activation_checkpoint.memory_budget", 0.5)
        t.put(
            "activation_checkpoint.mode activation_checkpoint.memory_budget",
            "--activation-memory-budget",
            budget,
        )
    t.harmless(keys, f"the mode is {mode}")


def filtered(t: Translation) -> None:
    for key in t.given("float8.filter_fqns quantize.linear.float8.filter_fqns"):
        value = t.source[key]
        names = value.split(",") if isinstance(value, str) else value
        if set(names) <= {"output"}:
            t.harmless(key, "the head is not computed in 8 bits")
        else:
            t.lose(key, "--fp8-format is for all linear layers of blocks")


def tensorboard(t: Translation) -> None:
    if t.get("metrics.enable_tensorboard"):
        folder = f"{t.get('job.dump_folder', './outputs')}/{t.get('metrics.save_tb_folder', 'tb')}"
        t.put("metrics.enable_tensorboard metrics.save_tb_folder", "--tensorboard-dir", folder)
    t.harmless("metrics.enable_tensorboard metrics.save_tb_folder", "it is off")


def wandb(t: Translation) -> None:
    if t.get("metrics.enable_wandb"):
        t.put("metrics.enable_wandb", "--report-to", "wandb")
    t.harmless("metrics.enable_wandb", "it is off")


def profile(t: Translation) -> None:
    keys = "profiling.enable_profiling profiling.profile_freq profiling.save_traces_folder"
    if t.get("profiling.enable_profiling"):
        every = int(t.get("profiling.profile_freq", 10))
        t.put("profiling.enable_profiling", "--profile", "auto")
        t.put(
            "profiling.profile_freq",
            "--profile-step-start",
            every - 1,
            note="once, not every so many steps",
        )
        t.put("profiling.profile_freq", "--profile-step-end", every)
        name = t.get("profiling.save_traces_folder", "profile_traces")
        folder = f"{t.get('job.dump_folder', './outputs')}/{name}"
        t.put("profiling.save_traces_folder", "--profile-dir", folder)
    t.harmless(keys, "it is off")


def memory(t: Translation) -> None:
    if t.get("profiling.enable_memory_snapshot"):
        t.put("profiling.enable_memory_snapshot", "--record-memory-history")
        if t.get("profiling.save_memory_snapshot_folder"):
            t.put(
                "profiling.save_memory_snapshot_folder",
                "--memory-snapshot-path",
                f"{t.get('profiling.save_memory_snapshot_folder')}.pickle",
            )
    t.harmless(
        "profiling.enable_memory_snapshot profiling.save_memory_snapshot_folder", "it is off"
    )


def validation(t: Translation) -> None:
    keys = [key for key in t.source if key.startswith("validation.")]
    if t.get("validation.enable", t.get("validation.enabled", False)):
        t.put(
            "validation.freq validation.enable validation.enabled",
            "--eval-interval",
            t.get("validation.freq", 10),
        )
        if int(t.get("validation.steps", -1)) > 0:
            t.put("validation.steps", "--eval-iters", t.get("validation.steps"))
        if t.get("validation.dataset_path"):
            t.put("validation.dataset_path", "--valid-data-path", t.get("validation.dataset_path"))
            t.harmless("validation.dataset", "the path says it")
        if "validation.dataset" not in t.outcomes:
            t.lose(
                "validation.dataset", "nothing is downloaded: give its files to --valid-data-path"
            )
        if "validation.steps" not in t.outcomes:
            t.lose("validation.steps", "--eval-iters is a number of global batches")
        t.harmless(
            "validation.local_batch_size validation.seq_len validation.enable validation.enabled",
            "evaluations have the batches of training",
        )
    else:
        t.put("validation", "--eval-iters", 0)
    t.harmless(keys, "it is off")


def timeout(t: Translation) -> None:
    key = "comm.init_timeout_seconds"
    if key in t.source:
        t.put(key, "--distributed-timeout-minutes", t.get(key) / 60)


RULES = rules_of(__name__)
