"""Rules of transformers' ``TrainingArguments`` (``tables/trainer.txt``), and its scripts.

The Trainer's schedules are those of transformers/optimization.py: the rate of step k, from 0, is
the peak times k / W in the warm-up of W steps, then falls until the last step.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megatron.apps.migration.deepspeed_keys import flattened, translate_json
from megatron.apps.migration.rules import rules_of
from megatron.apps.migration.translation import Translation, number
from megatron.config import ConfigError
from megatron.util.json_text import parse_json

_KERNELS = (
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_hf",
    "adamw_apex_fused",
    "adamw_torch_xla",
    "adamw_anyprecision",
)
_OPTIMIZERS = {
    **dict.fromkeys(
        (*_KERNELS, "adamw", "adamw_torch_npu_fused", "paged_adamw_32bit", "paged_adamw"), "adam"
    ),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit", "lion"), "lion"),
    **dict.fromkeys(("ademamix", "paged_ademamix_32bit"), "ademamix"),
    **{"sgd": "sgd", "schedule_free_adamw": "schedule_free", "muon": "muon"},
}
_EIGHT_BITS = ("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
_STYLES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "linear",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}
_WSD = {"linear": "linear", "cosine": "cosine", "1-sqrt": "minus_sqrt"}
_TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def tuning(t: Translation) -> bool:
    """True for a command of ``finetune.py``."""
    return t.program == "finetune.py"


def output(t: Translation) -> None:
    folder = t.get("output_dir", "trainer_output")
    if tuning(t):
        t.put("output_dir", "--output", folder)
    else:
        t.put("output_dir", "--save", folder)
        t.put("output_dir", "--load", folder, note="the same command continues")


def resume(t: Translation) -> None:
    value = t.get("resume_from_checkpoint")
    if value in (None, True, False) or tuning(t):
        t.harmless(
            "resume_from_checkpoint", "the same command continues from the newest checkpoint"
        )
    else:
        t.words.pop("--load", None)
        t.put("resume_from_checkpoint", "--load", str(value))


def accumulation(t: Translation) -> None:
    steps = t.get("gradient_accumulation_steps", 1)
    if steps != "auto":
        t.put("gradient_accumulation_steps", "--num-accumulation-steps", steps)


def length(t: Translation) -> None:
    """``max_steps``, or epochs, by default three."""
    steps, epochs = number(t.get("max_steps", -1)) or -1, number(t.get("num_train_epochs", 3.0))
    if steps > 0:
        t.put("max_steps", "--train-iters", steps)
        t.harmless("num_train_epochs", "max_steps is the length")
    elif epochs is None or not float(epochs).is_integer():
        t.lose("num_train_epochs", "--epochs is an integer; --train-iters gives another length")
    else:
        t.put("num_train_epochs", "--epochs", int(epochs))
    t.harmless("max_steps", "num_train_epochs is the length")


def schedule(t: Translation) -> None:
    """The Trainer's schedule of the learning rate. Where ``warmup_steps`` is below 1 it is a share,
    as in transformers 5."""
    kind = str(t.get("lr_scheduler_type", "linear"))
    given = _parameters(t)
    peak = float(number(t.get("learning_rate", 5e-5)) or 0.0)
    style = _STYLES.get(kind)
    if any(key.endswith("json:scheduler.type") for key in t.source):
        keys = [key for key in t.source if key.startswith("lr_scheduler")]
        t.harmless(keys, "the scheduler of the JSON replaces it, in transformers too")
        kind = "of the JSON"
    elif style is None or (kind == "polynomial" and given.get("power", 1.0) != 1.0):
        t.lose(
            "lr_scheduler_type",
            f"--lr-decay-style has no {kind}: constant, linear, cosine, inverse-square-root, WSD",
        )
    else:
        t.put("lr_scheduler_type", "--lr-decay-style", style)
    steps, share = number(t.get("warmup_steps", 0)) or 0, number(t.get("warmup_ratio", 0)) or 0
    if 0 < steps < 1:
        steps, share = 0, steps
    if kind == "constant":
        t.lose(
            "warmup_steps warmup_ratio",
            "constant has no warm-up in transformers; constant_with_warmup has",
        )
    elif steps > 0:
        t.put("warmup_steps", "--lr-warmup-iters", steps)
        t.harmless("warmup_ratio", "warmup_steps counts")
    elif share > 0:
        t.put("warmup_ratio warmup_steps", "--lr-warmup-fraction", share)
    elif tuning(t):
        t.put("warmup_steps", "--lr-warmup-fraction", 0)
    t.harmless("warmup_steps warmup_ratio", "there is no warm-up")
    _kwargs(t, kind, given, peak)


def _parameters(t: Translation) -> dict[str, Any]:
    """``lr_scheduler_kwargs``, which a command line has as JSON."""
    text = t.get("lr_scheduler_kwargs")
    if isinstance(text, str) and text.startswith("{"):
        return dict(parse_json(text.encode(), "lr_scheduler_kwargs"))
    prefix = "lr_scheduler_kwargs."
    return {key[len(prefix) :]: value for key, value in t.source.items() if key.startswith(prefix)}


def _kwargs(t: Translation, kind: str, given: dict[str, Any], peak: float) -> None:
    def keys(name: str) -> list[str]:
        return t.given(f"lr_scheduler_kwargs.{name}") or t.given("lr_scheduler_kwargs")

    least = given.get("min_lr", peak * given.get("min_lr_rate", given.get("min_lr_ratio", 0)))
    if kind == "polynomial":
        t.put(keys("lr_end"), "--min-lr", given.get("lr_end", 1e-7))
    elif kind in ("cosine_with_min_lr", "warmup_stable_decay") and least:
        for name in ("min_lr", "min_lr_rate", "min_lr_ratio"):
            if name in given:
                t.put(keys(name), "--min-lr", float(f"{least:.10g}"))
    if kind == "warmup_stable_decay":
        if least and t.has("--lr-warmup-iters"):
            t.put(
                keys("min_lr_ratio") or keys("min_lr"), "--lr-warmup-init", float(f"{least:.10g}")
            )
        t.put(keys("num_decay_steps"), "--lr-wsd-decay-iters", given.get("num_decay_steps", 1))
        t.put(
            keys("decay_type"),
            "--lr-wsd-decay-style",
            _WSD.get(given.get("decay_type", "cosine"), "cosine"),
        )
    if kind == "inverse_sqrt" and given.get("timescale"):
        t.put(keys("timescale"), "--lr-power-timescale", given["timescale"])
    rest = [key for key in t.source if key.startswith("lr_scheduler_kwargs")]
    t.lose([key for key in rest if key not in t.outcomes], f"{kind} has no such parameter here")


def optimizer(t: Translation) -> None:
    kind = str(t.get("optim", t.get("optimizer", "adamw_torch")))
    keys = "optim optimizer"
    if kind in _OPTIMIZERS:
        t.put(keys, "--optimizer", _OPTIMIZERS[kind])
    elif kind in _EIGHT_BITS:
        t.put(keys, "--optimizer", "adam")
        if t.has("--bf16") or t.get("bf16") in (True, "auto"):
            t.put(keys, "--use-precision-aware-optimizer")
            t.put(keys, "--exp-avg-dtype", "int8")
            t.put(keys, "--exp-avg-sq-dtype", "int8")
        else:
            t.lose(keys, "moments in 8 bits need --bf16; they are in float32")
    else:
        t.lose(
            keys, f"there is no {kind}; --optimizer has adam, muon, soap, lion, ademamix and others"
        )
    t.lose("optim_args", "the flags of the optimizer (--adam-*, --muon-*, --lion-*) say it")


def precision(t: Translation) -> None:
    for name in ("bf16", "fp16"):
        if t.get(name) in (True, "auto"):
            if name == "fp16" and t.get("bf16") in (True, "auto"):
                continue
            t.put(name, f"--{name}")
    t.harmless(
        "bf16 fp16 half_precision_backend fp16_backend fp16_opt_level",
        "it is off, or changes no dtype",
    )


def recompute(t: Translation) -> None:
    key = (
        "activation_checkpointing"
        if t.get("activation_checkpointing")
        else "gradient_checkpointing"
    )
    if t.get(key) and t.get(key) != "false":
        t.put(key, "--recompute-granularity", "full")
        t.put(key, "--recompute-method", "uniform")
        if t.get(key) in ("offload", "offload_disk"):
            t.put(key, "--checkpoint-in-cpu")
    t.harmless("gradient_checkpointing activation_checkpointing", "it is off")
    t.harmless(
        [k for k in t.source if "_checkpointing_kwargs" in k],
        "both ways of torch have the same result",
    )


def compiled(t: Translation) -> None:
    if t.get("torch_compile") or t.get("torch_compile_mode") or t.get("torch_compile_backend"):
        t.put("torch_compile torch_compile_backend", "--torch-compile", "on")
        if t.get("torch_compile_mode"):
            t.put("torch_compile_mode", "--torch-compile-mode", t.get("torch_compile_mode"))
    elif "torch_compile" in t.source:
        t.put("torch_compile", "--torch-compile", "off")
    t.harmless("torch_compile torch_compile_backend torch_compile_mode", "it is not set")


def report(t: Translation) -> None:
    named = t.get("report_to")
    names = named if isinstance(named, list) else [named]
    words = [str(name) for name in names if name in _TRACKERS]
    others = [str(name) for name in names if name not in (*_TRACKERS, "none", "all", None)]
    if words:
        t.put("report_to", "--report-to", ",".join(words))
        if t.get("run_name"):
            t.put("run_name", "--run-name", t.get("run_name"))
    if others:
        t.lose("report_to", f"{', '.join(others)}: --report-to has {', '.join(_TRACKERS)}")
    t.harmless(
        "report_to run_name", "it names no tracker that is used; metrics.jsonl has every log line"
    )


def saving(t: Translation) -> None:
    kind = t.get("save_strategy", "steps" if not tuning(t) or "save_steps" in t.source else "epoch")
    if kind == "steps":
        every = number(t.get("save_steps", 500))
        if every is not None and every < 1:
            t.lose(
                "save_steps", "--save-interval is a number of iterations, not a share of the run"
            )
        else:
            t.put("save_steps", "--save-interval", every)
        t.harmless("save_strategy", "--save-interval says it")
    elif kind == "epoch" and tuning(t):
        t.harmless("save_strategy", "finetune.py saves after every epoch")
    elif kind == "epoch":
        t.lose(
            "save_strategy", "--save-interval is in iterations; of an epoch's length if you know it"
        )
    else:
        t.harmless("save_strategy", "the last iteration is always saved")
    t.harmless("save_steps", f"save_strategy is {kind}")


def evaluation(t: Translation) -> None:
    kind = str(
        t.get(
            "eval_strategy",
            t.get("evaluation_strategy", "steps" if t.get("do_eval") and not tuning(t) else "no"),
        )
    )
    keys = "eval_strategy evaluation_strategy do_eval"
    if kind == "steps":
        every = number(t.get("eval_steps", t.get("logging_steps", 500)))
        if every is not None and every < 1:
            t.lose(
                "eval_steps", "--eval-interval is a number of iterations, not a share of the run"
            )
        else:
            t.put("eval_steps eval_strategy evaluation_strategy", "--eval-interval", every)
    elif kind == "epoch":
        t.lose(keys, "--eval-interval is in iterations; finetune.py evaluates ten times in a run")
    elif not tuning(t):
        t.put(keys, "--eval-iters", 0)
    t.harmless(f"{keys} eval_steps", f"eval_strategy is {kind}")
    t.harmless("eval_on_start eval_delay", "finetune.py evaluates before the first step, too")


def timeout(t: Translation) -> None:
    seconds = number(t.get("ddp_timeout"))
    if seconds:
        t.put("ddp_timeout", "--distributed-timeout-minutes", seconds / 60)


def deepspeed(t: Translation) -> None:
    """The JSON, if it is here; its "auto" values are the flags' in both programs."""
    key = next(iter(t.given("deepspeed deepspeed_config ds_config")), None)
    if key is None or not t.source[key]:
        t.harmless("deepspeed deepspeed_config ds_config", "DeepSpeed always trains")
        if not t.get("fsdp") and not any(name.startswith("fsdp_config") for name in t.source):
            t.put("deepspeed", "--zero-stage", 1 if t.has("--exp-avg-dtype") else 0)
        return
    prefix = f"{t.source[key]}:"
    if any(name.startswith(prefix) for name in t.source):
        t.tell(key, "the JSON below")
        translate_json(t, prefix)
    else:
        t.lose(
            key,
            f"the file {t.source[key]} is not here, and its keys are not translated: put it "
            "next to this one",
        )


def with_json(source: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A configuration with the keys of the DeepSpeed JSON that it names, if the file is here.
    ConfigError if it is not a JSON object."""
    for key in ("deepspeed", "deepspeed_config", "ds_config"):
        path = source.get(key)
        if not isinstance(path, str):
            continue
        file = next(
            (p for p in (Path(path), folder / path, folder / Path(path).name) if p.is_file()), None
        )
        if file is not None:
            content = parse_json(file.read_bytes(), str(file))
            if not isinstance(content, dict):
                raise ConfigError(f"{file}: expected a JSON object")
            return source | flattened(content, f"{path}:")
    return source


def fsdp(t: Translation) -> None:
    words = re.findall(r"\w+", str(t.get("fsdp", "")))
    keys = [key for key in t.source if key == "fsdp" or key.startswith("fsdp_")]
    stage = (
        3
        if "full_shard" in words
        or "hybrid_shard" in words
        or t.get("fsdp_config.reshard_after_forward")
        else 2
        if "shard_grad_op" in words
        else None
    )
    if stage is None and keys and "fsdp_config" in " ".join(keys):
        stage = 3
    if stage is not None:
        key = "fsdp" if words else next(key for key in keys if key != "fsdp")
        t.put(key, "--zero-stage", stage)
        if (
            "offload" in words
            or t.get("fsdp_config.fsdp_offload_params")
            or t.get("fsdp_config.offload_params")
        ):
            t.put_json(key, "zero_optimization.offload_param.device", "cpu")
            t.put_json(key, "zero_optimization.offload_optimizer.device", "cpu")
    t.harmless(keys, "ZeRO says what is divided" if stage is not None else "it is off")


def model(t: Translation) -> None:
    """The model of run_clm.py: a folder, or sizes for a new one."""
    folder = t.get("model_name_or_path")
    overrides = dict(
        pair.split("=", 1) for pair in str(t.get("config_overrides", "")).split(",") if "=" in pair
    )
    if folder:
        t.put(
            "model_name_or_path",
            "--pretrained-checkpoint",
            folder,
            note=f"a folder: hf download {folder} --local-dir {folder}"
            if "/" in str(folder) and not Path(str(folder)).exists()
            else "",
        )
        t.put("model_name_or_path", "--use-checkpoint-args")
    elif t.get("config_name"):
        t.lose(
            "config_name",
            "write the sizes of its config.json as flags: tools/plan.py --load FOLDER prints them",
        )
    else:
        _sizes(t, overrides)
    t.lose(
        "config_overrides",
        "flags give the sizes of another network" if folder else "a key without a flag",
    )
    named = t.get("tokenizer_name", t.get("config_name", folder))
    if named:
        t.put(
            "tokenizer_name model_name_or_path"
            if not t.get("tokenizer_name")
            else "tokenizer_name",
            "--tokenizer-type",
            "HFTokenizer",
        )
        t.put(
            "tokenizer_name model_name_or_path"
            if not t.get("tokenizer_name")
            else "tokenizer_name",
            "--tokenizer-model",
            named,
        )
    t.harmless("model_type config_name tokenizer_name", "the folder of the model says it")


_GPT2 = {
    "n_layer": ("--num-layers", 12),
    "n_embd": ("--hidden-size", 768),
    "n_head": ("--num-attention-heads", 12),
    "n_positions": ("--max-position-embeddings", 1024),
    "n_inner": ("--ffn-hidden-size", None),
}


def _sizes(t: Translation, overrides: dict[str, str]) -> None:
    if t.get("model_type") != "gpt2":
        t.lose(
            "model_type",
            "sizes of a new model are known here for gpt2; give those of others as flags "
            "(--num-layers, ...)",
        )
        return
    for name, (flag, default) in _GPT2.items():
        value = overrides.pop(name, default)
        if value is not None:
            t.put(
                "config_overrides model_type"
                if name in str(t.get("config_overrides", ""))
                else "model_type",
                flag,
                value,
            )
    if overrides:
        t.lose("config_overrides", f"{', '.join(overrides)}: not known here as flags of a GPT-2")


def data(t: Translation) -> None:
    train, valid, name = t.get("train_file"), t.get("validation_file"), t.get("dataset_name")
    if name:
        t.put(
            "dataset_name",
            "--data-path",
            name,
            note=f"a folder: hf download --repo-type dataset {name} --local-dir {name}",
        )
        t.put("dataset_name", "--lazy-loader")
        t.lose("dataset_config_name", "name the files of this configuration in --data-path")
    for key, path in (("train_file", train), ("validation_file", valid)):
        if path and str(path).endswith(".txt"):
            t.lose(
                key,
                'text files are JSON lines here, {"text": ...} a line',
            )
        elif path:
            flag = (
                "--valid-data-path"
                if key == "validation_file"
                else "--train-data-path"
                if valid
                else "--data-path"
            )
            t.put(key, flag, path)
    if t.program == "pretrain_gpt.py" and t.trainer == "transformers":
        t.put("run_clm.py", "--append-eod", False)
    t.harmless("dataset_config_name", "it is not set")


def split(t: Translation) -> None:
    share = number(t.get("validation_split_percentage", 5))
    if (
        share
        and not t.get("validation_file")
        and ("validation_split_percentage" in t.source or t.get("do_eval"))
    ):
        t.put("validation_split_percentage", "--split", f"{100 - share},{share},0")
    t.harmless("validation_split_percentage", "--valid-data-path is evaluated on")


def block(t: Translation) -> None:
    key = next(iter(t.given("block_size max_seq_length max_length model_max_length")), None)
    if key is not None:
        t.put(key, "--seq-length", t.source[key])
    elif t.get("model_type") == "gpt2":
        t.put("block_size", "--seq-length", 1024)


def words_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a script as keys: HfArgumentParser takes dashes as underscores, and values as
    text."""
    spelled = {"True": True, "true": True, "False": False, "false": False, "None": None}
    return {
        name.lstrip("-").replace("-", "_") or "(words)": spelled.get(value, value)
        if isinstance(value, str)
        else value
        for name, value in flags.items()
    }


RULES = rules_of(__name__)
