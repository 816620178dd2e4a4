"""Comparison of a `transformers` model's logits with ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.config import ModelConfig
from megatron.config.blocks import Chunk
from megatron.formats.huggingface import architecture_named
from megatron.formats.huggingface.architecture import Architecture
from megatron.formats.huggingface.config_reader import CHUNKED, SLIDING
from megatron.formats.huggingface.tasks import Inputs, Task
from megatron.formats.huggingface.within import renaming, text_content
from megatron.formats.transformers_folder import quiet_transformers
from megatron.model.layer_list import LayerStack

BOUND = 2.0**-23
"""Maximum difference of logits computed in float64, relative to the largest logit: the machine
epsilon of float32. Correct models still differ by float64 rounding and by truncated constants:
0.79788456 in BLOOM's GELU causes a difference of 1e-9."""
MERGED = 100 * BOUND
"""Bound for merged adapters. Merging rounds the sums with the base weights to float32, and a deep
model amplifies this rounding."""


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two models' logits on the same tokens: largest absolute difference and
    its bound, largest absolute logit, what was compared, and whether all logits agree."""

    largest: float
    allowed: float
    magnitude: float
    compared: str
    agree: bool

    def __str__(self) -> str:
        return (
            f"logits of {self.compared} agree, largest difference {self.largest:.2g} of "
            f"logits up to {self.magnitude:.3g} (computed in float64)"
        )


@dataclass(frozen=True)
class Reference:
    """Logits that `transformers` computes from a folder, by output name, with their inputs.
    ``bound`` is the maximum difference, relative to the largest logit."""

    model: ModelConfig
    task: Task
    inputs: Inputs
    logits: Mapping[str, Tensor]
    bound: float = BOUND

    @torch.no_grad()
    def compared_with(self, ours: LayerStack) -> Comparison:
        """Compare the logits of all heads with our model's (float32, on the CPU). The model is
        converted to float64 in place, and back afterwards."""
        state = ours.double()(self.inputs.ours)
        results = {
            name: _counted(values, self.inputs)
            for name, values in self.task.outputs(state, self.model).items()
        }
        ours.float()
        apart = {name: float((results[name] - self.logits[name]).abs().max()) for name in results}
        sizes = {name: float(self.logits[name].abs().max()) for name in results}
        worst = max(results, key=lambda name: apart[name] / max(sizes[name], 1e-30))
        first = next(iter(results.values()))
        return Comparison(
            largest=apart[worst],
            allowed=self.bound * sizes[worst],
            magnitude=max(sizes.values()),
            compared=f"{self.task.count(first)} {self.task.unit}",
            agree=all(apart[name] <= self.bound * sizes[name] for name in results),  # False for NaN
        )


@torch.no_grad()
def reference_of(
    folder: Path,
    model: ModelConfig,
    strict: bool = True,
    seed: int = 1234,
    adapters: Path | None = None,
) -> Reference:
    """Return the logits that `transformers` computes in float64 with the model in a folder, on
    random tokens at the first and last positions. ``model`` is our configuration for the folder.
    With ``adapters``, peft applies the adapters in that folder. With ``strict``, `transformers`
    must find exactly the expected weights. Raises CheckpointError if it does not, or if its
    vocabulary size, number of positions, windows or LongRoPE factors differ from ``model``'s."""
    path = folder / "config.json"
    whole = read_json(path, lenient=True)
    content = text_content(whole, path)
    form = architecture_named(content, path)
    task = form.task_of(model)
    inputs = task.inputs(model, seed)
    # The bucket of a relative position depends on float32 rounding, so it stays float32.
    with _Float64(integers=model.positions.position_embedding_type != "relative"), _Constants():
        further = "" if form.ahead is None else form.ahead.pattern(model)
        class_name = form.class_of(model)
        # Without images, a multimodal model computes the same as its text model.
        if renaming(whole) is not None:
            class_name = "AutoModelForImageTextToText"
        theirs = _load(folder, class_name, strict, further)
        if adapters is not None:
            theirs = _adapted(theirs, adapters, model.vocabulary.size)
        _check_settings(theirs.config.get_text_config(), form, model, path)
        output = theirs(**inputs.theirs)
    logits = {
        name: _counted(values, inputs)
        for name, values in output.items()
        # router logits are a tuple, and not compared
        if name.endswith("logits") and isinstance(values, Tensor)
    }
    return Reference(model, task, inputs, logits, BOUND if adapters is None else MERGED)


def compare_logits(
    ours: LayerStack, folder: Path, model: ModelConfig, strict: bool = True, seed: int = 1234
) -> Comparison:
    """Compare our model's logits with those of :func:`reference_of`. ``ours`` is converted to
    float64 and back, see :meth:`Reference.compared_with`."""
    return reference_of(folder, model, strict, seed).compared_with(ours)


class _Float64(TorchDispatchMode):
    """Torch mode in which a model computes everything in float64, including norms and attention,
    which would cast to float32. With ``integers``, float32 values computed from integers, such as
    RoPE tables and ALiBi distances, become float64 too."""

    def __init__(self, integers: bool) -> None:
        super().__init__()
        self._integers = integers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        wide = any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in args)
        if (wide or self._integers) and options.get("dtype") == torch.float32:
            options["dtype"] = torch.float64
        return func(*args, **options)


class _Constants(TorchFunctionMode):
    """Torch mode that creates float32 constants in float64, such as ALiBi's slopes and XGLM's mask
    value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.tensor and options.get("dtype") == torch.float32:
            options["dtype"] = torch.float64
        if func is torch.full and isinstance(args[-1], float):
            options.setdefault("dtype", torch.float64)
        return func(*args, **options)


@torch.no_grad()
def largest_difference(
    first: LayerStack, second: LayerStack, form: Architecture, model: ModelConfig, seed: int = 1234
) -> float:
    """Return the largest absolute difference between the logits of two of our models (float32, on
    the CPU), on the tokens of :func:`compare_logits`."""
    task = form.task_of(model)
    inputs = task.inputs(model, seed)
    outputs, wanted = (task.outputs(ours(inputs.ours), model) for ours in (first, second))
    return max(
        float((_counted(outputs[name], inputs) - _counted(wanted[name], inputs)).abs().max())
        for name in outputs
    )


def _counted(values: Tensor, inputs: Inputs) -> Tensor:
    """Return the logits to compare: those of counted positions if they have a position
    dimension."""
    return values if inputs.counted is None or values.ndim < 3 else values[inputs.counted]


def _load(folder: Path, class_name: str, strict: bool, further: str = "") -> Any:
    """Load a transformers model. ``further`` is a pattern for tensor names that it may ignore."""
    import transformers  # slow to import

    with quiet_transformers():
        loaded: Any = getattr(transformers, class_name).from_pretrained(
            folder,
            dtype=torch.float64,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            attn_implementation="eager",  # fused kernels do not support softcaps
        )
    theirs, report = loaded
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        wrong = sorted(
            name for name in map(str, report[problem]) if not re.fullmatch(further, name)
        )
        if strict and wrong:
            names = ", ".join(wrong[:5])
            raise CheckpointError(f"transformers reports {problem} in {folder}: {names}")
    theirs.config._experts_implementation = "eager"  # grouped GEMMs do not support float64
    return theirs.eval()


def peft_reads(folder: Path) -> bool:
    """Return whether a folder has adapters and peft is installed to read them."""
    return (folder / "adapter_config.json").is_file() and find_spec("peft") is not None


def _adapted(base: Any, adapters: Path, vocabulary: int) -> Any:
    """Return a model with peft's adapters. They are not merged, since peft merges a tied head
    wrongly."""
    import peft

    if base.config.vocab_size != vocabulary:
        base.resize_token_embeddings(vocabulary, mean_resizing=False)
    adapted = peft.PeftModel.from_pretrained(
        base, adapters, autocast_adapter_dtype=False, trust_remote_code=False
    )
    return adapted.double().eval().get_base_model()


def _check_settings(config: Any, form: Architecture, model: ModelConfig, path: Path) -> None:
    """Check settings that have no effect on a few hundred tokens. Raises CheckpointError if a value
    that `transformers` reads differs from ours."""
    positions, scaling = model.positions, model.positions.rope_scaling
    ours: dict[str, Any] = {"vocab_size": model.vocabulary.size}
    theirs: dict[str, Any] = {"vocab_size": config.vocab_size}
    if positions.longest is not None:
        # Some architectures also count the rows before the first position.
        written = form.config(model).get("max_position_embeddings", positions.longest)
        ours["max_position_embeddings"] = written
        theirs["max_position_embeddings"] = config.max_position_embeddings
    if scaling.long_factor is not None:
        table = getattr(config, "rope_parameters", None) or config.rope_scaling
        ours["long_factor"], theirs["long_factor"] = scaling.long_factor, (*table["long_factor"],)
    window, kinds = (getattr(config, name, None) for name in ("sliding_window", "layer_types"))
    # twice sliding_window, in architectures that have it
    window = getattr(config, "local_attention", window)
    if kinds is None and hasattr(config, "sliding_window") and len(set(model.windows)) == 1:
        # transformers 4 does not list which blocks have a window
        kinds = [SLIDING] * model.num_layers
    if kinds is not None and not (window and getattr(config, "use_sliding_window", None) is False):
        ours["sliding_window of each block"] = model.windows
        chunk = getattr(config, "attention_chunk_size", None)
        reaches = {SLIDING: window, CHUNKED: chunk and Chunk(chunk)}
        theirs["sliding_window of each block"] = tuple(reaches.get(kind) for kind in kinds)
    for name, value in ours.items():
        if value != theirs[name]:
            raise CheckpointError(
                f"{path}: transformers reads {name} {theirs[name]}, and the checkpoint has {value}"
            )
