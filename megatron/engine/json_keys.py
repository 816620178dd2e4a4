"""Which keys of DeepSpeed's JSON and which flags mean the same, and how a dotted key is reached."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.config import ConfigError
from megatron.config.kinds.curriculum import CurriculumConfig

Json = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """A JSON key and the config field that mean the same.

    Attributes:
        key: dotted path in the JSON; a number indexes a list.
        field: name of the config field.
        decode: JSON value to field value.
        encode: field value to JSON value; None leaves the key out.
    """

    key: str
    field: str
    decode: Callable[[Any], Any] = lambda value: value
    encode: Callable[[Any], Any] = lambda value: value


_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "sgd": "sgd"}


def _optimizer(name: Any) -> str:
    try:
        return _OPTIMIZERS[str(name).lower()]
    except KeyError:
        raise ConfigError(
            f'optimizer.type "{name}": AdamW, Adam (both with decoupled weight decay) and SGD are '
            "the optimizers of this trainer"
        ) from None


CURRICULA = tuple(field.name for field in dataclasses.fields(CurriculumConfig))
"""Sections that DeepSpeed does not read, or not any more: their keys are the config fields' names,
their texts the fields' values."""


def section_text(section: Any) -> str:
    """A section as a config field keeps it."""
    return json.dumps(section, sort_keys=True)


def section_of(text: str | None) -> Json | None:
    """The inverse of :func:`section_text`."""
    return None if text is None else json.loads(text)


PAIRS = (
    Pair("train_micro_batch_size_per_gpu", "micro_batch_size"),
    Pair("train_batch_size", "global_batch_size"),
    Pair("gradient_clipping", "clip_grad"),
    Pair("zero_optimization.stage", "zero_stage"),
    Pair("bf16.enabled", "bf16"),
    Pair("fp16.enabled", "fp16"),
    Pair("fp16.loss_scale", "loss_scale", lambda v: v or None, lambda v: v or 0),
    Pair(
        "fp16.initial_scale_power",
        "initial_loss_scale",
        lambda power: 2.0**power,
        lambda scale: int(math.log2(scale)),
    ),
    Pair("fp16.loss_scale_window", "loss_scale_window"),
    Pair("fp16.hysteresis", "hysteresis"),
    Pair("fp16.min_loss_scale", "min_loss_scale"),
    Pair(
        "data_types.grad_accum_dtype",
        "accumulate_allreduce_grads_in_fp32",
        lambda name: name == "fp32",
        lambda on: "fp32" if on else None,
    ),
    Pair("optimizer.type", "optimizer", _optimizer, {"adam": "AdamW", "sgd": "SGD"}.get),
    Pair("optimizer.params.lr", "lr"),
    Pair("optimizer.params.betas.0", "adam_beta1"),
    Pair("optimizer.params.betas.1", "adam_beta2"),
    Pair("optimizer.params.eps", "adam_eps"),
    Pair("optimizer.params.weight_decay", "weight_decay"),
    Pair("optimizer.params.momentum", "sgd_momentum"),
    *(Pair(key, key, section_text, section_of) for key in CURRICULA),
)


def get(content: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none, "auto" where a section above it is."""
    for part in key.split("."):
        if isinstance(content, list):
            content = content[int(part)] if int(part) < len(content) else None
        elif isinstance(content, dict):
            content = content.get(part)
        else:
            return content if content == "auto" else None
    return content


def offloads(content: Json, key: str) -> bool:
    """Whether DeepSpeed's section ``offload_optimizer`` or ``offload_param`` moves anything."""
    return get(content, f"zero_optimization.{key}.device") not in (None, "none")


def put(content: Json, key: str, value: Any) -> None:
    """Sets a dotted key, and makes the sections that it lies in."""
    *sections, last = key.split(".")
    node: Any = content
    for part, following in zip(sections, (*sections, last)[1:], strict=True):
        if node.get(part, "auto") == "auto":
            node[part] = [None, None] if following.isdigit() else {}
        node = node[part]
    if isinstance(node, list):
        node[int(last)] = value
    else:
        node[last] = value


def drop_auto(content: Json, key: str) -> None:
    """Leaves out a key that is "auto", or the list or the "auto" section that it would lie in."""
    *sections, last = key.split(".")
    node = get(content, ".".join(sections)) if sections else content
    if isinstance(node, dict):
        if node.get(last) == "auto":
            del node[last]
    elif node is not None:
        *outer, name = sections
        parent = get(content, ".".join(outer)) if outer else content
        parent.pop(name)


def autos(node: Any, path: str = "") -> Iterator[str]:
    """The dotted keys whose value is "auto"."""
    if node == "auto":
        yield path
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from autos(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from autos(value, f"{path}.{place}")
