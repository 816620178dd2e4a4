"""The Adam state in a rank's file of an old Megatron checkpoint, by parameter.

Megatron numbers an optimizer's parameters by groups: first those with weight decay, matrices, then
those without, norms and biases (or the reverse, where a pipeline stage registers a norm first).
Within a group the order is that of registration, as in the model's dictionary. The file does not
contain this numbering, so everything that can be checked is: the groups' sizes, every shape, and
with half-precision training that each float32 copy, rounded, is the model's weight. Where something
does not fit, the state is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")

Key = tuple[int, str]
"""Number of the model chunk, Megatron's name of the parameter."""

_COMPARED = 1024
"""Number of elements of a weight that are compared with its float32 copy."""


class UnusableError(Exception):
    """Why optimizer state cannot be used."""


def adam_state(
    optimizer: Any, chunks: Sequence[Mapping[str, Tensor]]
) -> tuple[dict[Key, dict[str, Tensor]], int]:
    """``exp_avg``, ``exp_avg_sq`` and perhaps ``weight`` (float32) of every parameter, and Adam's
    number of steps, from the file's ``optimizer``; ``chunks`` are the parameters of each model
    chunk, in the order of registration. Raises UnusableError if they are missing, of another
    optimizer, or cannot be assigned with certainty."""
    if not isinstance(optimizer, dict):
        raise UnusableError("there is no optimizer state")
    inner = optimizer.get("optimizer", optimizer)
    masters = optimizer.get("fp32_from_fp16_params")
    if not isinstance(inner, dict) or not inner.get("state") or not inner.get("param_groups"):
        raise UnusableError("its optimizer state has another form than Adam's in one file per rank")
    found: dict[Key, dict[str, Tensor]] = {}
    steps: set[int] = set()
    groups = inner["param_groups"]
    for number, (group, keys) in enumerate(zip(groups, _assigned(groups, chunks), strict=True)):
        for place, (index, key) in enumerate(zip(group["params"], keys, strict=True)):
            weight, state = chunks[key[0]][key[1]], inner["state"].get(index)
            if not isinstance(state, dict):
                raise UnusableError(f"its optimizer state lacks that of {key[1]}")
            tensors = {}
            if masters is not None:
                tensors["weight"] = _master(masters, number, place, weight, key[1])
            for kind in MOMENTS:
                values = state.get(kind)
                if not isinstance(values, Tensor) or values.shape != weight.shape:
                    raise UnusableError(f"its {kind} of {key[1]} has another shape")
                tensors[kind] = values
            found[key] = tensors
            steps.add(_number(state.get("step", group.get("step"))))
    if len(steps) != 1:
        raise UnusableError("its optimizer does not say one number of steps")
    return found, steps.pop()


def _assigned(groups: Any, chunks: Sequence[Mapping[str, Tensor]]) -> Iterator[list[Key]]:
    """The parameters of each group, in its order."""
    decayed: list[Key] = []
    others: list[Key] = []
    for number, chunk in enumerate(chunks):
        for name, values in chunk.items():
            (decayed if values.ndim > 1 else others).append((number, name))
    sizes = [len(group["params"]) for group in groups if group["params"]]
    for order in ([decayed, others], [others, decayed]):
        filled = iter([keys for keys in order if keys])
        if sizes == [len(keys) for keys in order if keys] and _decay_agrees(groups, order, decayed):
            yield from (next(filled) if group["params"] else [] for group in groups)
            return
    raise UnusableError("its optimizer's groups are not those of matrices and of norms and biases")


def _decay_agrees(groups: Any, order: list[list[Key]], decayed: list[Key]) -> bool:
    """Whether groups that say they have no weight decay would get norms and biases."""
    filled = [group for group in groups if group["params"]]
    for group, keys in zip(filled, [keys for keys in order if keys], strict=True):
        factor = group.get("wd_mult", group.get("weight_decay"))
        if "wd_mult" in group and bool(factor) != (keys is decayed):
            return False
        if "wd_mult" not in group and keys is not decayed and factor:
            return False
    return True


def _master(masters: Any, group: int, place: int, weight: Tensor, name: str) -> Tensor:
    """The float32 copy of a weight, which must be what the weight was rounded from."""
    try:
        values = masters[group][place]
    except (IndexError, TypeError, KeyError):
        raise UnusableError(f"its optimizer lacks the float32 copy of {name}") from None
    if not isinstance(values, Tensor) or values.shape != weight.shape:
        raise UnusableError(f"its float32 copy of {name} has another shape")
    part = values.detach().reshape(-1)[:_COMPARED].to(weight.dtype)
    if not torch.equal(part, weight.reshape(-1)[:_COMPARED]):
        raise UnusableError(f"its float32 copy of {name} is of other weights")
    return values.detach()


def _number(step: Any) -> int:
    """A number of steps, which can be a tensor."""
    if isinstance(step, Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, int | float) and not isinstance(step, bool) and step == int(step):
        return int(step)
    raise UnusableError("its optimizer does not say how many steps it has done")
