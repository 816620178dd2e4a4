"""The flags of a training run, made those of a check.

A check takes the flags of pretrain_gpt.py as they stand in a script. Those of the layout come from
the layouts instead, and those of what a check does not do are left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config import (
    FLAG_CLASSES,
    CheckpointConfig,
    ConfigError,
    LoggingConfig,
    Setting,
    Settings,
)
from megatron.config.engine import FastPathsConfig
from megatron.config.flags import flag_of, names_of
from megatron.config.layouts import Layout
from megatron.config.output import ProfilingConfig
from megatron.engine.deepspeed_json import merge, read_json

_FIELDS = {f.name: f for part in FLAG_CLASSES for f in dataclasses.fields(part)}

OF_LAYOUTS = frozenset(names_of("layout", *FLAG_CLASSES))
"""Config fields that a layout's name sets. (Recomputation, which names may say too, may also be a
flag: one process recomputes as well.)"""
LEFT_OUT = frozenset(
    {
        f.name
        for part in (CheckpointConfig, LoggingConfig, ProfilingConfig, FastPathsConfig)
        for f in dataclasses.fields(part)
    }
    | set(names_of("course", *FLAG_CLASSES))
    | {name for name in _FIELDS if name.startswith("lr_warmup")}
)
"""Config fields of what a check does not do: it saves, loads, evaluates, logs, profiles, compiles
nothing, multiplies in no 8 bits, in which layouts differ, and a warm-up would keep the weights of
its few steps where they are."""
_LENGTHS = {"train_iters", "train_samples", "train_tokens"}
_OF_ENGINE = OF_LAYOUTS | {"deepspeed_config", "accumulate_allreduce_grads_in_fp32", "loss_scale"}


@dataclass(frozen=True)
class CheckFlags:
    """Flags of the runs of a check, layouts aside.

    Attributes:
        layout: of a layout's run, to which its own are added.
        plain: of the run on one process, what the DeepSpeed JSON says included.
        left_out: given, but of no use in a check.
    """

    layout: list[str]
    plain: list[str]
    left_out: list[str]


def check_flags(settings: Settings, layouts: Sequence[Layout], steps: int) -> CheckFlags:
    """Completes the flags with what a check needs.

    Args:
        settings: the flags of pretrain_gpt.py that were given.
        layouts: what is compared.
        steps: how many steps to train.

    Raises:
        ConfigError: a layout's flag is among them, or the DeepSpeed JSON is wrong.
    """
    for name in settings.keys() & OF_LAYOUTS:
        raise ConfigError(
            f"{settings[name].origin.removeprefix('flag ')}: the layouts to compare are named by "
            "--layouts, as in --layouts tp2,pp2,dp2-zero1"
        )
    if "use_checkpoint_args" in settings:
        raise ConfigError("--use-checkpoint-args: a check loads nothing; give the model's flags")
    kept = {name: s for name, s in settings.items() if name not in LEFT_OUT}
    path = kept["deepspeed_config"].value if "deepspeed_config" in kept else ""
    merged = merge(kept, read_json(path) if path else {}, path, world_size=1)
    added = {
        name: Setting(value, "check")
        for name, value in _defaults(merged, layouts, steps).items()
        if name not in merged
    }
    return CheckFlags(
        layout=_words(kept | added),
        plain=_words({n: s for n, s in (merged | added).items() if n not in _OF_ENGINE}),
        left_out=[settings[name].origin.removeprefix("flag ") for name in settings.keys() - kept],
    )


def _defaults(given: Settings, layouts: Sequence[Layout], steps: int) -> dict[str, Any]:
    """Values that a check needs, or that few will want to say."""
    values: dict[str, Any] = {
        "exit_interval": steps, "eval_iters": 0, "num_workers": 0, "peak_tflops": 1.0,
        "lr": 1e-3, "micro_batch_size": 1,
    }  # fmt: skip
    micro = given["micro_batch_size"].value if "micro_batch_size" in given else 1
    values["global_batch_size"] = smallest_batch(layouts, micro)
    if not given.keys() & _LENGTHS:
        values["train_iters"] = steps
    if "loss_scale" not in given:
        # The usual 2^32 overflows for many steps, each of which is skipped.
        values["initial_loss_scale"] = 4096.0
    if not given.keys() & {"data_path", "train_data_path", "mock_data"}:
        values["mock_data"] = True
        if "tokenizer_type" not in given:
            values |= {"tokenizer_type": "NullTokenizer", "vocab_size": 255}
    return values


def smallest_batch(layouts: Sequence[Layout], micro_batch_size: int) -> int:
    """The smallest global batch that every layout can work on, and that can show a difference.

    That is at least two micro batches for each replica, lest there is no sum over them to get
    wrong, and four for one process, lest there is a single order to sum them in.
    """
    # Only interleaved pipelines need a multiple of their ranks; it costs the others little.
    step = math.lcm(*(micro_batch_size * a.data * a.pipeline for a in layouts))
    fewest = max(
        micro_batch_size * max(4, a.data * max(2, a.fewest_micro_batches)) for a in layouts
    )
    return -(-fewest // step) * step


def _words(settings: Settings) -> list[str]:
    """The command line that gives these settings."""
    words = []
    for name, setting in settings.items():
        if setting.value is None:
            continue  # a JSON's way to say that it is derived
        given = setting.origin.startswith("flag ")
        flag = setting.origin.removeprefix("flag ") if given else flag_of(_FIELDS[name])
        values = setting.value if isinstance(setting.value, tuple) else (setting.value,)
        words += [flag] if isinstance(setting.value, bool) else [flag, *map(str, values)]
    return words
