"""Flags of ``finetune.py`` beyond the training flags, and the training settings they imply."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.files import CheckpointError
from megatron.config import CheckpointConfig, ConfigError, Setting, Settings
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, Bounds, build, option
from megatron.config.training import LENGTHS
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json
from megatron.features.instruction.record_files import HELD_OUT as HELD_OUT_SPLITS
from megatron.features.instruction.record_files import TRAIN as TRAIN_SPLITS
from megatron.features.instruction.record_files import split_of
from megatron.training.resume import ResumeSource, find_origin

ORIGIN = "finetune.py"
CHECKPOINTS = "checkpoints"
"""Subfolder of --output for the checkpoints."""
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SEQ_LENGTH = 16, 2, 2048
RATES = {
    "full": 1e-5, "lora": 1e-4, "full preference": 5e-7, "lora preference": 5e-6, "full rl": 1e-6,
    "lora rl": 1e-5,
}  # fmt: skip
"""Usual peak learning rates: LLaMA-Factory's, and trl's for reinforcement learning."""
_OF_THIS_COMMAND = {
    **dict.fromkeys(("pretrained_checkpoint", "use_checkpoint_args"), "--model"),
    **dict.fromkeys(("data_path", "train_data_path", "data_args_path", "train_data"), "--data"),
    **dict.fromkeys(("valid_data_path", "valid_data"), "--eval-data"),
    **dict.fromkeys(("save", "load"), "--output"),
    "split": "--held-out",
}
"""Settings that a flag of this command sets, so that their own flags must not be given as well."""
_SHOWN = {
    "--pretrained-checkpoint": "--model",
    "--data-path": "--data",
    "--train-data-path": "--data",
    "--valid-data-path": "--eval-data",
    "in --split": "in --held-out",
}
_SHOWN_PATTERN = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, _SHOWN))})(?![\w-])")
_HELD_OUT_SHARE = Bounds(lambda value: 0 <= value <= 0.5, "must be in [0, 0.5]")


@dataclass(frozen=True)
class TuningConfig:
    """Options for fine-tuning: the model, its data, and the result."""

    model: str | None = option(None)
    """Folder of the model as downloaded from Hugging Face, or a checkpoint in any format."""
    data: tuple[str, ...] = option(())
    """Files, folders or globs of examples (JSON, JSON lines, Parquet, CSV, TSV). Examples are
    instructions with answers; with --preference, better and worse answers; with --rl, prompts with
    references for the reward. The folder of a dataset means its training split. PATH PATH ... uses
    all examples of each path, WEIGHT PATH WEIGHT PATH ... blends them."""
    output: str | None = option(None)
    """Folder for the result: a Hugging Face model, the checkpoints, and a report."""
    eval_data: tuple[str, ...] = option(())
    """Files, folders or globs of held-out examples, instead of a fraction of --data. The folder of
    a dataset means its validation split or, without one, its test split."""
    held_out: float | None = option(
        None, derived="0.05; 0 with --eval-data", bounds=_HELD_OUT_SHARE, aliases=("--val-size",)
    )
    """Fraction of --data that is held out for evaluation. 0 holds out nothing."""
    epochs: int | None = option(
        None,
        derived="3; with --preference and --rl 1",
        bounds=POSITIVE,
        aliases=("--num-train-epochs",),
    )
    """Number of epochs over the examples. --train-iters and similar flags set another length."""
    sample_prompts: str | None = option(None, derived="the first held-out prompts")
    """File with prompts that the model answers at every evaluation during training: a text file
    with one prompt per line, or a file of examples."""
    samples: int = option(3, bounds=NOT_NEGATIVE)
    """Number of prompts that the model answers at each evaluation during training. 0 for none."""
    sample_tokens: int | None = option(
        None, derived="128, or half of the model's positions where that is less", bounds=POSITIVE
    )
    """Maximum number of tokens in an answer at an evaluation."""
    export: bool = option(True, off="--no-export")
    """Write checkpoints only, without a Hugging Face folder."""
    merge_adapters: bool = option(True, flag="--merge-adapters", off="--no-merge-adapters")
    """With --lora, write the model with its adapters merged into the weights, in addition to the
    adapters in the folder adapter."""
    overwrite: bool = option(False)
    """Replace a model in --output that this command did not write."""
    max_shard_size: str = option("5GB")
    """Maximum size of a safetensors file in the result, for example 500MB, 5GB or 4GiB."""


@contextmanager
def errors_in_own_flags() -> Iterator[None]:
    """In this context, name flags of finetune.py in error messages, not the flags that they set."""
    try:
        yield
    except (ValueError, OSError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            message = _SHOWN_PATTERN.sub(lambda flag: _SHOWN[flag.group()], error.args[0])
            error.args = (message,)
        raise


def check_flags(config: TuningConfig, settings: Settings) -> None:
    """Check the flags of the command. Raises ConfigError if a flag is missing or contradicts
    another, or if a flag is given that this command sets itself."""
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
    """Return the given settings and those of the DeepSpeed JSON, completed with this command's
    paths and defaults. The training length is only included if a flag sets it. Raises ConfigError
    or CheckpointError for unusable flags or models."""
    path = settings["deepspeed_config"].value if "deepspeed_config" in settings else ""
    content = read_json(path) if path else {}
    settings = deepspeed_json.merge(settings, content, path, processes)
    settings = derived(_files(config, settings)) | settings
    return derived(_defaults(config, settings, processes, has_json=bool(path))) | settings


def derived(values: Mapping[str, Any]) -> Settings:
    """Return values as settings whose origin is this command."""
    return {name: Setting(value, ORIGIN) for name, value in values.items()}


def _files(config: TuningConfig, settings: Settings) -> dict[str, Any]:
    """Return the values of settings for model, data and folders."""
    checkpoints = str(Path(config.output or "") / CHECKPOINTS)
    files: dict[str, Any] = {
        "pretrained_checkpoint": config.model,
        "use_checkpoint_args": True,
        "save": checkpoints,
        "load": checkpoints,
    }
    if not _objective(settings):
        files["sft"] = True
    if config.eval_data:
        files["train_data_path"] = weighted(training_paths(config))
        files["valid_data_path"] = weighted(
            tuple(split_of(path, HELD_OUT_SPLITS) for path in config.eval_data)
        )
    else:
        share = 0.05 if config.held_out is None else config.held_out
        files["data_path"] = weighted(training_paths(config))
        files["split"] = f"{1 - share:g},{share:g},0"
        # Never train and evaluate on the same prompt.
        files["split_by"] = "prompt"
    return files


def training_paths(config: TuningConfig) -> tuple[str, ...]:
    """Return the paths of ``--data``, with each dataset's folder replaced by its training split."""
    return tuple(split_of(path, TRAIN_SPLITS) for path in config.data)


def weighted(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return paths, each preceded by a weight. Without weights, all get weight 1, which is replaced
    once the numbers of examples are known."""
    if len(paths) < 2 or is_weighted(paths):
        return paths
    return tuple(word for path in paths for word in ("1", path))


def is_weighted(paths: tuple[str, ...]) -> bool:
    """Return whether a list of paths begins with a weight."""
    try:
        float(paths[0])
    except ValueError:
        return False
    return len(paths) > 1


def _defaults(
    config: TuningConfig, settings: Settings, processes: int, has_json: bool
) -> dict[str, Any]:
    """Return defaults for settings that neither flags nor the DeepSpeed JSON contain."""
    origin = find_origin(build(CheckpointConfig, settings))
    assert origin is not None  # not None, because --model exists
    model = origin.found.open(verify=False).model
    lora = "lora" in settings or "qlora" in settings
    objective = _objective(settings)
    kind = f"{'lora' if lora else 'full'} {objective}".strip()
    defaults = {
        **_moved_tokenizer(config, origin),
        "seq_length": min(SEQ_LENGTH, model.seq_length),
        "lr": RATES[kind],
        "lr_decay_style": "cosine",
        "weight_decay": 0.0,
        "keep_last": 2,
        **_batches(settings, processes),
    }
    # As in trl, no dropout: the policy starts equal to its reference and scores its own answers.
    if objective:
        defaults |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    else:
        defaults["sft_loss_weights"] = "tokens"
    if not has_json and torch.cuda.is_available():
        defaults |= {} if "fp16" in settings else {"bf16": True}
        defaults["zero_stage"] = 1
    if not {"lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens"} & settings.keys():
        defaults["lr_warmup_fraction"] = 0.03
    return defaults


def _objective(settings: Settings) -> str:
    """Return ``preference`` or ``rl`` if the run has that objective, otherwise ""."""
    return next((name for name in ("preference", "rl") if name in settings), "")


def _moved_tokenizer(config: TuningConfig, origin: ResumeSource) -> dict[str, str]:
    """Return the tokenizer path of --model if the base model has moved since the checkpoint."""
    run = origin.found.open(verify=False).run if origin.continues else None
    if run is None or config.model is None:
        return {}
    then, tokenizer = run.checkpoint.pretrained_checkpoint, run.tokenizer.tokenizer_model
    if then is None or tokenizer is None or Path(then) != Path(tokenizer):
        return {}
    return {"tokenizer_model": config.model}


def _batches(settings: Settings, processes: int) -> dict[str, int]:
    """Return batch sizes that are consistent with each other and close to the usual ones."""

    def value(name: str, default: int) -> int:
        return settings[name].value if name in settings else default

    group = _group(settings)
    ranks = value("tensor_model_parallel_size", 1) * value("pipeline_model_parallel_size", 1)
    replicas = max(1, processes // ranks)
    whole = settings.get("global_batch_size")
    if whole is not None:
        most = max(1, whole.value // replicas)
        micro = max(n for n in range(1, MICRO_BATCH_SIZE + 1) if most % n == 0)
        return {"micro_batch_size": micro}
    micro = value("micro_batch_size", MICRO_BATCH_SIZE)
    sizes = {"micro_batch_size": micro}
    if "num_accumulation_steps" not in settings:
        multiple = math.lcm(micro * replicas, group)
        sizes["global_batch_size"] = -(-GLOBAL_BATCH_SIZE // multiple) * multiple
    return sizes


def _group(settings: Settings) -> int:
    """Return the number of completions per prompt, all of which must be in one batch."""
    if "rl" not in settings:
        return 1
    from megatron.apps.reinforcement.settings import PAPERS  # requires all features' flags

    given = settings.get("num_generations")
    paper = PAPERS[settings["rl"].value][1]
    return paper.get("num_generations", 8) if given is None else given.value


def has_length(settings: Settings) -> bool:
    """Return whether a flag sets the training length."""
    return any(f"train_{unit}" in settings for unit in LENGTHS)
