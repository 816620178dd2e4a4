"""Compares a model of `transformers` with one of ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.config import ModelConfig
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.registry import architecture_named
from megatron.formats.huggingface.tasks import Inputs
from megatron.model.layer_list import LayerStack

RTOL, ATOL = 1.3e-6, 1e-5
"""Largest relative and absolute difference of logits, those of torch.testing for float32."""


@dataclass(frozen=True)
class Comparison:
    """Logits of two models on the same tokens: largest absolute difference, largest absolute logit,
    how many were compared of what, and whether all agree within :data:`RTOL` and :data:`ATOL`."""

    largest: float
    magnitude: float
    compared: str
    dtype: torch.dtype
    agree: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"logits of {self.compared} agree, largest difference {self.largest:.2g} of "
            f"logits up to {self.magnitude:.3g} (computed in {dtype})"
        )


@torch.no_grad()
def compare_logits(
    ours: LayerStack, folder: Path, model: ModelConfig, strict: bool = True, seed: int = 1234
) -> Comparison:
    """Compares the logits of all heads of ``ours`` (float32, on the CPU) and ``folder`` on random
    tokens at the first and at the last positions of the model, in float64 where rounding to float32
    exceeds what is allowed. With ``strict`` `transformers` must find all weights and no other in
    the folder. Raises CheckpointError if `transformers` finds weights missing or superfluous in the
    folder."""
    form = architecture_named(
        read_json(folder / "config.json", lenient=True), folder / "config.json"
    )
    theirs = _load(folder, model, form.class_of(model), strict)
    task = form.task_of(model)
    inputs = task.inputs(model, seed)

    def compared(dtype: torch.dtype) -> Comparison:
        state = ours.to(dtype)(inputs.ours)
        with _Unrounded():
            output = theirs.to(dtype)(**inputs.theirs)
        pairs = [
            (_counted(values, inputs), _counted(getattr(output, name), inputs))
            for name, values in task.outputs(state, model).items()
        ]
        return Comparison(
            largest=max(float((found - wanted).abs().max()) for found, wanted in pairs),
            magnitude=max(float(found.abs().max()) for found, _ in pairs),
            compared=f"{task.count(pairs[0][0])} {task.unit}",
            dtype=dtype,
            agree=all(
                bool(torch.isclose(wanted, found, rtol=RTOL, atol=ATOL).all())
                for found, wanted in pairs
            ),
        )

    result = compared(torch.float32)
    if not result.agree:
        result = compared(torch.float64)
        ours.float()
    return result


class _Unrounded(TorchDispatchMode):
    """Leaves float64 values alone that code written for less casts to float32, as T5's norms and
    attention do: all of a model in float64 is then computed in float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        wide = any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in args)
        if wide and options.get("dtype") == torch.float32:
            options["dtype"] = torch.float64
        return func(*args, **options)


@torch.no_grad()
def largest_difference(
    first: LayerStack, second: LayerStack, form: Architecture, model: ModelConfig, seed: int = 1234
) -> float:
    """The largest absolute difference of the logits of two models of ours (float32, on the CPU), on
    the tokens of :func:`compare_logits`."""
    task = form.task_of(model)
    inputs = task.inputs(model, seed)
    found, wanted = (task.outputs(ours(inputs.ours), model) for ours in (first, second))
    return max(
        float((_counted(found[name], inputs) - _counted(wanted[name], inputs)).abs().max())
        for name in found
    )


def _counted(values: Tensor, inputs: Inputs) -> Tensor:
    """The logits that are compared: of positions that are not padding, where they have one."""
    return values if inputs.counted is None or values.ndim < 3 else values[inputs.counted]


def _load(folder: Path, model: ModelConfig, class_name: str, strict: bool) -> Any:
    import transformers  # takes seconds

    # torch's fused kernel has no softcap.
    softcap = model.attention.attn_logit_softcapping is not None
    loaded: Any = getattr(transformers, class_name).from_pretrained(
        folder,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        **({"attn_implementation": "eager"} if softcap else {}),
    )
    theirs, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if strict and report[problem]:
            names = ", ".join(map(str, sorted(report[problem])[:5]))
            raise CheckpointError(f"transformers reports {problem} in {folder}: {names}")
    return theirs.eval()
