"""Rules of nanotron's keys that are more than a name (``tables/nanotron.txt``), as in nanotron 0.4:
https://github.com/huggingface/nanotron. Its rates are those of ``lr_scheduler_builder``."""

from __future__ import annotations

import json
from typing import Any

from megatron.apps.migration.rules import rules_of
from megatron.apps.migration.translation import Translation, is_off

_CONFIG = "model.model_config."
_RATES = "optimizer.learning_rate_scheduler."


def rope_scaling(t: Translation) -> None:
    prefix = f"{_CONFIG}rope_scaling."
    scaling = {
        key[len(prefix) :]: value for key, value in t.source.items() if key.startswith(prefix)
    }
    if scaling:
        scaling.setdefault("rope_type", scaling.pop("type", "linear"))
        t.put([k for k in t.source if k.startswith(prefix)], "--rope-scaling", json.dumps(scaling))
    t.harmless(f"{_CONFIG}rope_scaling", "the positions are not scaled")


def network(t: Translation) -> None:
    act = t.get(f"{_CONFIG}hidden_act", "silu")
    if act != "silu":
        t.lose(
            f"{_CONFIG}hidden_act",
            f"MLPs are gated by SiLU in nanotron's Llama; there is no gate of {act}",
        )
    t.put(f"{_CONFIG}hidden_act", "--swiglu")
    t.put("norms", "--normalization", "RMSNorm")
    t.put("positions", "--position-embedding-type", "rope")
    t.put("biases", "--disable-bias-linear")
    for name in ("--attention-dropout", "--hidden-dropout"):
        t.put("dropout", name, 0)
    tied = t.get(f"{_CONFIG}tie_word_embeddings", False)
    t.put(f"{_CONFIG}tie_word_embeddings", "--untie-embeddings-and-output-weights", not tied)
    if t.get(f"{_CONFIG}attention_bias", False):
        t.put(f"{_CONFIG}attention_bias", "--add-qkv-bias")
    t.harmless(f"{_CONFIG}attention_bias", "there are no biases")


def z_loss(t: Translation) -> None:
    keys = f"{_CONFIG}z_loss_enabled {_CONFIG}z_loss_coefficient"
    if t.get(f"{_CONFIG}z_loss_enabled", False):
        t.put(keys, "--z-loss-coeff", t.get(f"{_CONFIG}z_loss_coefficient", 1e-4))
    t.harmless(keys, "it is off")


def documents(t: Translation) -> None:
    keys = f"{_CONFIG}_use_doc_masking {_CONFIG}flex_attention_mask"
    if t.get(f"{_CONFIG}_use_doc_masking") or "document" in str(
        t.get(f"{_CONFIG}flex_attention_mask", "")
    ):
        t.put(keys, "--reset-attention-mask")
        t.put(keys, "--reset-position-ids")
    t.harmless(keys, "it is off")


def initialisation(t: Translation) -> None:
    if "model.init_method.std" in t.source:
        t.put("model.init_method.std", "--init-method-std", t.get("model.init_method.std"))
        t.harmless(f"{_CONFIG}initializer_range", "init_method says it")
    if "model.init_method.path" in t.source:
        t.put("model.init_method.path", "--pretrained-checkpoint", t.get("model.init_method.path"))
        t.harmless(f"{_CONFIG}initializer_range", "weights come from a checkpoint")
    if str(t.get("model.init_method.scaling_method", "NUM_LAYERS")).upper() == "NUM_LAYERS":
        t.harmless(
            "model.init_method.scaling_method",
            "output projections start with the standard deviation over sqrt(2 x layers)",
        )
    t.lose(
        "model.init_method.scaling_method",
        "output projections start with the standard deviation over sqrt(2 x layers)",
    )
    t.lose(
        "model.init_method.use_mup",
        "--use-mup is another parametrisation (widths relative to a base), not the spectral one",
    )
    if (
        f"{_CONFIG}initializer_range" in t.source
        and f"{_CONFIG}initializer_range" not in t.outcomes
    ):
        t.put(
            f"{_CONFIG}initializer_range", "--init-method-std", t.get(f"{_CONFIG}initializer_range")
        )


def tokenizer(t: Translation) -> None:
    key = "tokenizer.tokenizer_name_or_path"
    if t.get(key):
        t.put(key, "--tokenizer-type", "HFTokenizer")
        t.put(key, "--tokenizer-model", t.get(key))
    t.harmless(key, "it is not set")


def validation(t: Translation) -> None:
    every, batches = t.get("tokens.val_check_interval", -1), t.get("tokens.limit_val_batches", 0)
    if every > 0 and batches > 0:
        t.put("tokens.val_check_interval", "--eval-interval", every)
        t.put("tokens.limit_val_batches", "--eval-iters", batches)
    else:
        t.put("evaluation", "--eval-iters", 0)
        t.harmless("tokens.val_check_interval tokens.limit_val_batches", "evaluation is off")


def excluded(t: Translation) -> None:
    key = "optimizer.weight_decay_exclude_named_params"
    names = t.get(key, [])
    if names and set(names) <= {".*norm.*", ".*bias.*", ".*layernorm.*"}:
        t.harmless(key, "biases and norms are never decayed")
    t.lose(key, "--wd-group PATTERN=0 names matrices by this project's names (embedding.*=0)")


def schedule(t: Translation) -> None:
    """Warm-up to step W, a constant part until step S, a fall of D steps."""
    steps, warmup = int(t.get("tokens.train_steps", 0)), int(t.get(f"{_RATES}lr_warmup_steps", 0))
    start = t.get(f"{_RATES}lr_decay_starting_step")
    falls = t.get(f"{_RATES}lr_decay_steps")
    falls = int(falls) if falls is not None else steps - warmup - int(start or 0)
    start = warmup if start is None else int(start)
    kind = t.get(f"{_RATES}lr_decay_style", "linear")
    least = t.get(f"{_RATES}min_decay_lr", t.get(f"{_RATES}learning_rate"))
    if least is not None:
        t.put(f"{_RATES}min_decay_lr", "--min-lr", least)
    if t.get(f"{_RATES}lr_warmup_style", "linear") == "linear":
        t.put(f"{_RATES}lr_warmup_steps", "--lr-warmup-iters", warmup)
        t.harmless(f"{_RATES}lr_warmup_style", "warm-ups are linear")
    else:
        t.harmless(f"{_RATES}lr_warmup_steps {_RATES}lr_warmup_style", "a constant warm-up is none")
    keys = f"{_RATES}lr_decay_starting_step {_RATES}lr_decay_steps"
    if start == warmup and kind in ("linear", "cosine"):
        t.put(f"{_RATES}lr_decay_style", "--lr-decay-style", kind)
    else:
        t.put(f"{_RATES}lr_decay_style", "--lr-decay-style", "WSD")
        t.put(
            f"{_RATES}lr_decay_style",
            "--lr-wsd-decay-style",
            {"1-sqrt": "minus_sqrt"}.get(kind, kind),
        )
        t.put(keys, "--lr-wsd-decay-iters", falls)
    t.put(keys, "--lr-decay-iters", start + falls)


def processes(t: Translation) -> None:
    t.processes = int(t.get("parallelism.dp", 1))
    for name in ("tp", "pp", "context_parallel_size"):
        t.processes *= int(t.get(f"parallelism.{name}", 1))
    t.tell(
        "parallelism.dp", f"{t.processes} processes in all"
    ) if "parallelism.dp" in t.source else None


def sequence(t: Translation) -> None:
    mode = str(t.get("parallelism.tp_mode", "ALL_REDUCE")).upper()
    if mode == "REDUCE_SCATTER" and int(t.get("parallelism.tp", 1)) > 1:
        t.put("parallelism.tp_mode", "--sequence-parallel")
    t.harmless("parallelism.tp_mode", "activations between layers are whole")


def schedule_of_pipeline(t: Translation) -> None:
    if int(t.get("parallelism.pp", 1)) > 1:
        t.harmless(
            "parallelism.pp_engine",
            "the order of passes changes no sum; --pipeline-schedule has 1f1b, the default, "
            "and others",
        )
    t.harmless("parallelism.pp_engine", "there is no pipeline")


def recompute(t: Translation) -> None:
    if t.get("parallelism.recompute_layer", False):
        t.put("parallelism.recompute_layer", "--recompute-granularity", "full")
        t.put("parallelism.recompute_layer", "--recompute-method", "uniform")
    t.harmless("parallelism.recompute_layer", "it is off")


def stages(t: Translation) -> None:
    """The data of the first stage; nanotron's later stages are further runs here."""
    first = (
        "data_stages.0.data." if any(k.startswith("data_stages.0.") for k in t.source) else "data."
    )
    _dataset(t, first + "dataset.")
    if f"{first}num_loading_workers" in t.source:
        t.put(f"{first}num_loading_workers", "--num-workers", t.get(f"{first}num_loading_workers"))
    t.harmless(f"{first}seed", "general.seed is that of the data order too")
    t.harmless("data_stages.0.name data_stages.0.start_training_step", "the first stage")
    later = [k for k in t.source if k.startswith(("data_stages.", first)) and k not in t.outcomes]
    t.lose(
        [k for k in later if k.startswith("data_stages.") and not k.startswith("data_stages.0.")],
        "a later stage: stop at its first step (--exit-interval), and continue with --load, "
        "its --data-path and --allow-changed-data",
    )
    t.harmless([k for k in later if is_off(t.source[k])], "it is off")


def _dataset(t: Translation, prefix: str) -> None:
    folder, named = t.get(f"{prefix}dataset_folder"), t.get(f"{prefix}hf_dataset_or_datasets")
    blend = f"{prefix}hf_dataset_or_datasets."
    keys = [key for key in t.source if key.startswith(blend)] or [blend[:-1]]
    if keys != [blend[:-1]]:
        named = {key[len(blend) :]: t.source[key] for key in keys}
    if folder is not None:
        folders = folder if isinstance(folder, list) else [folder]
        t.lose(
            f"{prefix}dataset_folder",
            f"{', '.join(map(str, folders))}: datatrove's files of tokens are not read; "
            "tools/preprocess_data.py tokenizes the text",
        )
        t.lose(f"{prefix}dataset_weights", "--data-path WEIGHT PREFIX ... blends")
    elif named is not None:
        weights: dict[str, Any] = (
            {named: 1}
            if isinstance(named, str)
            else named
            if isinstance(named, dict)
            else dict.fromkeys(named, 1)
        )
        words = (
            list(weights)
            if len(weights) == 1
            else [w for pair in weights.items() for w in reversed(pair)]
        )
        t.put(keys, "--data-path", *words, note="a local folder of text files, read while training")
        t.put(keys, "--lazy-loader")
        if t.get(f"{prefix}text_column_name", "text") != "text":
            t.put(f"{prefix}text_column_name", "--text-key", t.get(f"{prefix}text_column_name"))
    t.harmless(
        f"{prefix}text_column_name {prefix}dataset_overwrite_cache "
        f"{prefix}dataset_processing_num_proc_per_process {prefix}tokenizer_name "
        f"{prefix}vocab_size {prefix}token_size_in_bytes",
        "it is the default, or follows from the files",
    )
    t.lose(
        f"{prefix}hf_dataset_splits {prefix}hf_dataset_config_name",
        "name the files of this split in --data-path",
    ) if t.get(f"{prefix}hf_dataset_splits", "train") != "train" or t.get(
        f"{prefix}hf_dataset_config_name"
    ) else None
    t.harmless(
        f"{prefix}hf_dataset_splits {prefix}hf_dataset_config_name", "the folder's training files"
    )


def folder(t: Translation) -> None:
    key = "checkpoints.checkpoints_path"
    if t.get(key):
        t.put(key, "--save", t.get(key))
        t.put(key, "--load", t.get(key))
    t.harmless(key, "nothing is saved")


def resume(t: Translation) -> None:
    path = t.get("checkpoints.resume_checkpoint_path")
    if path:
        t.words.pop("--load", None)
        t.put(
            "checkpoints.resume_checkpoint_path",
            "--load",
            path,
            note="nanotron's optimizer states are not read: weights alone",
        )
        if t.get("checkpoints.load_optimizer", True) is False:
            t.put("checkpoints.load_optimizer", "--no-load-optim")
        if t.get("checkpoints.load_lr_scheduler", True) is False:
            t.put("checkpoints.load_lr_scheduler", "--override-opt_param-scheduler")
    t.harmless(
        "checkpoints.resume_checkpoint_path checkpoints.load_optimizer "
        "checkpoints.load_lr_scheduler",
        "it is the default, or nothing is resumed",
    )


def profiler(t: Translation) -> None:
    keys = [key for key in t.source if key.startswith("profiler.")]
    if t.get("profiler.profiler_export_path"):
        first = (
            int(t.get("profiler.skip_first", 3))
            + int(t.get("profiler.wait", 1))
            + int(t.get("profiler.warmup", 1))
        )
        t.put("profiler.profiler_export_path", "--profile", "auto")
        t.put(
            "profiler.profiler_export_path", "--profile-dir", t.get("profiler.profiler_export_path")
        )
        t.put("profiler.skip_first profiler.wait profiler.warmup", "--profile-step-start", first)
        t.put("profiler.active", "--profile-step-end", first + int(t.get("profiler.active", 1)))
    t.harmless([*keys, "profiler"], "it is off, or torch's profiler always records it")


RULES = rules_of(__name__)
