"""From the few flags of a fine-tuning to the settings of its training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.apps.finetune.config import TuningConfig
from megatron.checkpoint.files import CheckpointError
from megatron.config import CheckpointConfig, ConfigError, Setting, Settings
from megatron.config.flags import build
from megatron.config.training import LENGTHS
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json
from megatron.features.instruction.record_files import HELD_OUT as HELD_OUT_SPLITS
from megatron.features.instruction.record_files import TRAIN as TRAIN_SPLITS
from megatron.features.instruction.record_files import split_of
from megatron.training.resume import find_origin
from megatron.training.resume_source import ResumeSource

ORIGIN = "finetune.py"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in --output."""
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SEQ_LENGTH = 16, 2, 2048
HELD_OUT = 0.05
RATES = {"full": 1e-5, "lora": 1e-4, "full preference": 5e-7, "lora preference": 5e-6}
"""Usual peak learning rates, those of LLaMA-Factory's examples."""
_FOR_INSTRUCTIONS = {"sft_loss_weights": "tokens"}
_FOR_PREFERENCES = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
"""As trl: the model begins as its reference."""
_OF_THIS_COMMAND = {
    **dict.fromkeys(("pretrained_checkpoint", "use_checkpoint_args"), "--model"),
    **dict.fromkeys(("data_path", "train_data_path", "data_args_path", "train_data"), "--data"),
    **dict.fromkeys(("valid_data_path", "valid_data"), "--eval-data"),
    **dict.fromkeys(("save", "load"), "--output"),
    "split": "--held-out",
}
"""What the flags of this command set; they are not given besides."""


def check_flags(config: TuningConfig, settings: Settings) -> None:
    """Raises ConfigError if a flag is missing, does not name what it should, or sets what this
    command sets."""
    for name, what in (
        ("model", "the folder of a Hugging Face model, or a checkpoint"),
        ("data", "files of examples"),
        ("output", "the folder for the result"),
    ):
        if not getattr(config, name):
            raise ConfigError(f"--{name} is missing: {what}")
    assert config.model is not None and config.output is not None
    for name, flag in _OF_THIS_COMMAND.items():
        if name in settings:
            shown = settings[name].origin.removeprefix("flag ")
            raise ConfigError(f"{shown}: finetune.py sets this by {flag}; give that instead")
    if not Path(config.model).exists():
        raise CheckpointError(
            f"--model {config.model}: there is no such file or folder; nothing is downloaded, so "
            "name a folder that `hf download` or git has made"
        )
    model, output = Path(config.model).resolve(), Path(config.output).resolve()
    if output == model or output.is_relative_to(model) or model.is_relative_to(output):
        raise ConfigError(
            f"--output {config.output} and --model {config.model} contain each other; name another "
            "folder for the result"
        )
    if config.eval_data and config.held_out:
        raise ConfigError(
            f"--held-out {config.held_out:g} and --eval-data {config.eval_data[0]} both say what "
            "is evaluated on; give one of them"
        )


def completed(config: TuningConfig, settings: Settings, processes: int) -> Settings:
    """The settings of the training, without its length if no flag gives one. Raises ConfigError or
    CheckpointError if flags or the model cannot be used."""
    given = settings.get("deepspeed_config")
    path = given.value if given else ""
    content = read_json(path) if path else {}
    settings = deepspeed_json.merge(settings, content, path, processes)
    settings = _own(_files(config, settings)) | settings
    defaults = _defaults(config, settings, processes, has_json=bool(path))
    return _own(defaults) | settings


def _own(values: Mapping[str, Any]) -> Settings:
    return {name: Setting(value, ORIGIN) for name, value in values.items()}


def _files(config: TuningConfig, settings: Settings) -> dict[str, Any]:
    """Model, data and folders."""
    checkpoints = str(Path(config.output or "") / CHECKPOINTS)
    found: dict[str, Any] = {
        "pretrained_checkpoint": config.model,
        "use_checkpoint_args": True,
        "save": checkpoints,
        "load": checkpoints,
    }
    if "preference" not in settings:
        found["sft"] = True
    if config.eval_data:
        found["train_data_path"] = weighted(training_paths(config))
        found["valid_data_path"] = weighted(
            tuple(split_of(path, HELD_OUT_SPLITS) for path in config.eval_data)
        )
    else:
        share = HELD_OUT if config.held_out is None else config.held_out
        found["data_path"] = weighted(training_paths(config))
        found["split"] = f"{1 - share:g},{share:g},0"
        # No prompt is trained on and evaluated on.
        found["split_by"] = "prompt"
    return found


def training_paths(config: TuningConfig) -> tuple[str, ...]:
    """``--data``, in which the folder of a data set names its training split."""
    return tuple(split_of(path, TRAIN_SPLITS) for path in config.data)


def weighted(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Paths with a weight before each; several without any are used alike until the number of their
    examples is known."""
    if len(paths) < 2 or is_weighted(paths):
        return paths
    return tuple(word for path in paths for word in ("1", path))


def is_weighted(paths: tuple[str, ...]) -> bool:
    """Whether a list of paths begins with a weight."""
    try:
        float(paths[0])
    except ValueError:
        return False
    return len(paths) > 1


def _defaults(
    config: TuningConfig, settings: Settings, processes: int, has_json: bool
) -> dict[str, Any]:
    """What neither flags nor the DeepSpeed JSON give."""
    origin = find_origin(build(CheckpointConfig, settings))
    assert origin is not None  # --model exists
    model = origin.found.open(verify=False).model
    lora = "lora" in settings or "qlora" in settings
    kind = f"{'lora' if lora else 'full'}{' preference' if 'preference' in settings else ''}"
    found = {
        **_moved_tokenizer(config, origin),
        "seq_length": min(SEQ_LENGTH, model.seq_length),
        "lr": RATES[kind],
        "lr_decay_style": "cosine",
        "weight_decay": 0.0,
        "keep_last": 2,
        **(_FOR_PREFERENCES if "preference" in settings else _FOR_INSTRUCTIONS),
        **_batches(settings, processes),
    }
    if not has_json and torch.cuda.is_available():
        found |= {} if "fp16" in settings else {"bf16": True}
        found["zero_stage"] = 1
    if not {"lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"} & settings.keys():
        found["lr_warmup_fraction"] = 0.03
    return found


def _moved_tokenizer(config: TuningConfig, origin: ResumeSource) -> dict[str, str]:
    """The tokenizer of --model, where the checkpoint that is continued names that of the base as it
    was called then."""
    run = origin.found.open(verify=False).run if origin.continues else None
    if run is None or config.model is None:
        return {}
    then, tokenizer = run.checkpoint.pretrained_checkpoint, run.tokenizer.tokenizer_model
    if then is None or tokenizer is None or Path(then) != Path(tokenizer):
        return {}
    return {"tokenizer_model": config.model}


def _batches(settings: Settings, processes: int) -> dict[str, int]:
    """Batch sizes near the usual ones that divide each other."""

    def value(name: str, default: int) -> int:
        return settings[name].value if name in settings else default

    ranks = value("tensor_model_parallel_size", 1) * value("pipeline_model_parallel_size", 1)
    replicas = max(1, processes // ranks)
    whole = settings.get("global_batch_size")
    if whole is not None:
        most = max(1, whole.value // replicas)
        micro = max(n for n in range(1, MICRO_BATCH_SIZE + 1) if most % n == 0)
        return {"micro_batch_size": micro}
    micro = value("micro_batch_size", MICRO_BATCH_SIZE)
    found = {"micro_batch_size": micro}
    if "num_accumulation_steps" not in settings:
        found["global_batch_size"] = -(-GLOBAL_BATCH_SIZE // (micro * replicas)) * micro * replicas
    return found


def has_length(settings: Settings) -> bool:
    """Whether flags say how long the training is."""
    return any(f"train_{unit}" in settings for unit in LENGTHS)
