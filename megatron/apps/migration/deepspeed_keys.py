"""The DeepSpeed JSON of another trainer: what are flags here, what stays in the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.apps.migration.rules import TableRow, put_value, table
from megatron.apps.migration.translation import Translation, Unfit
from megatron.config import ConfigError

_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd", "lion": "lion", "muon": "muon"}
_ZERO = "zero_optimization"


def flattened(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested objects by dotted key, and of lists of objects and of ``betas`` by number;
    empty ones as they are."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and (
            name == "betas" or any(isinstance(v, Mapping) for v in value)
        ):
            value = {str(index): each for index, each in enumerate(value)}
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{key}.")
        else:
            flat[key] = value
    return flat


def translate_json(t: Translation, prefix: str, flags_win: bool = False) -> None:
    """Translates the keys with a prefix, such as ``ds.json:``. With ``flags_win`` a flag that is
    there already replaces a value of the JSON, as in Megatron-DeepSpeed; otherwise two different
    values are a ConfigError."""
    keys = [key for key in t.source if key.startswith(prefix)]
    for key in keys:
        name, value = key[len(prefix) :], t.source[key]
        row = next((row for row in table("deepspeed") if row.fits(name)), None)
        if row is None:
            continue
        if value == "auto":
            t.harmless(key, "auto: the flags say it, or DeepSpeed's default is used")
            continue
        try:
            _apply(t, row, key, name, prefix)
        except Unfit as error:
            t.lose(key, str(error))
        except ConfigError:
            if not flags_win:
                raise
            t.harmless(key, "the command line has another value, which Megatron-DeepSpeed used")


def _apply(t: Translation, row: TableRow, key: str, name: str, prefix: str) -> None:
    value = t.source[key]
    if row.action == "keep":
        t.put_json(key, name, value)
    elif row.action == "=":
        t.harmless(key, row.words)
    elif row.action == "!":
        off = t.source.get(f"{prefix}{name.split('.')[0]}.enabled") is False
        if off or (name.startswith(f"{_ZERO}.mics") and value == -1):
            t.harmless(key, "it is off")
        else:
            t.lose(key, row.words)
    elif row.action == "flag":
        put_value(t, key, row.words, value)
    else:
        _converted(t, row.action, key, name, prefix)


def _converted(t: Translation, rule: str, key: str, name: str, prefix: str) -> None:
    value = t.source[key]
    if rule == "@accumulation":
        if t.has("--global-batch-size") or t.has("--num-accumulation-steps"):
            t.harmless(key, "the batch sizes of the flags say it")
        elif isinstance(t.get(f"{prefix}train_batch_size"), int):
            t.harmless(key, "it follows from train_batch_size")
        else:
            t.put(key, "--num-accumulation-steps", value)
    elif rule == "@scale":
        power = name.endswith("power")
        if power or value:
            t.put(
                key,
                "--initial-loss-scale" if power else "--loss-scale",
                2**value if power else value,
            )
        else:
            t.harmless(key, "the scale is dynamic")
    elif rule == "@accumulate":
        t.put(key, "--accumulate-allreduce-grads-in-fp32", value == "fp32")
    elif rule == "@optimizer":
        kind = _OPTIMIZERS.get(str(value).lower())
        if kind is None:
            t.lose(key, f"there is no {value}; --optimizer has adam, muon, soap, lion and others")
        else:
            t.put(key, "--optimizer", kind)
    elif rule == "@offload":
        section = "offload_param" if "param" in name else "offload_optimizer"
        if value:
            t.put_json(key, f"{_ZERO}.{section}.device", "cpu")
        else:
            t.harmless(key, "it is off")
    elif rule == "@scheduler":
        _scheduler(t, prefix)


def _scheduler(t: Translation, prefix: str) -> None:
    """The schedulers of deepspeed/runtime/lr_schedules.py. Their warm-up is logarithmic unless
    warmup_type is linear."""
    kind, params = t.get(f"{prefix}scheduler.type"), f"{prefix}scheduler.params."
    styles = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    keys = [key for key in t.source if key.startswith(f"{prefix}scheduler.")]
    if kind not in styles:
        t.lose(
            keys,
            f"there is no {kind}: --lr-decay-style has constant, linear, cosine, WSD and others",
        )
        return

    def given(name: str) -> Any:
        value = t.get(params + name)
        return None if value == "auto" else value

    t.put(f"{prefix}scheduler.type", "--lr-decay-style", styles[kind])
    for name, flag in (
        ("warmup_max_lr", "--lr"),
        ("warmup_min_lr", "--lr-warmup-init"),
        ("warmup_num_steps", "--lr-warmup-iters"),
        ("total_num_steps", "--lr-decay-iters"),
    ):
        if given(name) is not None and name != "warmup_min_lr" or given(name):
            t.put(params + name, flag, given(name))
    warms = given("warmup_num_steps") or any(flag.startswith("--lr-warmup") for flag in t.words)
    if warms and t.get(f"{params}warmup_type", "log") == "log":
        t.tell(
            f"{prefix}scheduler.type",
            "a linear warm-up, where DeepSpeed's follows the logarithm of the step",
        )
    if kind == "WarmupCosineLR" and given("cos_min_ratio") and t.has("--lr"):
        least = float(t.words["--lr"][1]) * given("cos_min_ratio")
        t.put(params + "cos_min_ratio", "--min-lr", least)
    t.harmless(keys, "it is what happens without a flag, or auto")


def put_zero(t: Translation, prefix: str) -> None:
    """Keys of a section zero_optimization that is a part of another file."""
    for key in [key for key in t.source if key.startswith(prefix)]:
        name = f"{_ZERO}.{key[len(prefix) :]}"
        row = next(row for row in table("deepspeed") if row.fits(name))
        if t.source[key] == "auto":
            t.harmless(key, "auto: DeepSpeed's default is used")
        else:
            _apply(t, row, key, name, "")
