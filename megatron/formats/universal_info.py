"""DeepSpeed's names for parameters, and the information that ``ds_to_universal`` needs about them.

Engines name a parameter by its layer's index in the layer list (``3.mlp.up.weight``,
``tied_modules.embed.weight``). ``universal_checkpoint_info`` has lists of regular expressions for
these names. A name may match at most one expression in a list, and each expression must match
something. Therefore each expression is a single name, escaped and anchored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megatron.config import ModelConfig, ParallelConfig
from megatron.model.layer_list import LayerSpec, LayerStack, canonical_parameters
from megatron.parallel.shard import Cut, Shard, shard_of

RUN, COUNTERS, BUFFERS = "run_config", "run_state", "buffers"
"""Keys in the client state, which survives a conversion by DeepSpeed: the content of config.json,
the content of state.json, and a pipeline stage's buffers by canonical name."""
UNIVERSAL_VERSION = 0.4
"""Version of DeepSpeed's universal format."""
_AFFINE_VERSION = 1


class Registered(NamedTuple):
    """Parameter with its name in an engine's module, and its tensor-parallel shard."""

    name: str
    shard: Shard


def registered_parameters(layers: Sequence[LayerSpec]) -> dict[str, list[Registered]]:
    """Return the engine's parameters for each canonical name, in the order of the whole layer list.
    There is usually one. With fewer key and value heads than ranks, there are two: the queries, and
    the keys and values."""
    with torch.device("meta"):
        stack = LayerStack(layers, ParallelConfig())
    by_name: dict[str, list[Registered]] = {}
    canonical = canonical_parameters(stack, layers)
    for (registered, param), (name, _) in zip(stack.named_parameters(), canonical, strict=True):
        by_name.setdefault(name, []).append(Registered(registered, shard_of(param)))
    tied = {layer.tied_key: place for place, layer in reversed([*enumerate(layers)])}

    def place(name: str) -> int:
        """Return the index of a parameter's layer. Tied modules are registered first, but belong to
        the layer that first uses them."""
        first, second, *_ = by_name[name][0].name.split(".")
        return tied[second] if first == "tied_modules" else int(first)

    return {name: by_name[name] for name in sorted(by_name, key=place)}


def universal_info(
    parameters: Iterable[Registered], model: ModelConfig, size: int
) -> dict[str, Any]:
    """Return the ``universal_checkpoint_info`` for an engine with tensor-parallel size ``size``.
    ``parameters`` must be those of the whole layer list."""
    replicated, rows, vocabulary, halves, tied = [], [], [], [], []
    fused: list[dict[str, Any]] = []
    widths: dict[str, list[list[int]]] = {}
    shared: dict[str, dict[str, Any]] = {}
    for part in parameters:
        cut, pattern = part.shard.over("tensor"), f"^{re.escape(part.name)}$"
        if part.name.startswith("tied_modules."):
            tied.append(pattern)
        if cut is None:
            replicated.append(pattern)
            continue
        if cut.unpadded is not None:
            vocabulary.append(pattern)
        if cut.copies > 1:
            shared[pattern] = _affine_map(part.shard, cut, size)
        elif cut.dim == 1 and not cut.parts:
            rows.append(pattern)
        elif cut.held is None and not cut.dim and _are_halves(cut):
            halves.append(pattern)
        elif cut.held is None and (cut.parts or cut.dim):
            shape = [*part.shard.full_shape]
            parts = cut.parts or (shape[cut.dim],)
            shape[cut.dim : cut.dim + 1] = [parts]  # type: ignore[list-item]
            dim = {"partition_dim": cut.dim}
            fused.append({"patterns": [pattern], "shape": tuple(shape), **dim})
            widths[pattern] = [[length // size] * size for length in parts]
    return {
        "universal_checkpoint_version": UNIVERSAL_VERSION,
        "tp_replicated_parameter_patterns": replicated,
        "parameter_with_row_parallelism_patterns": rows,
        "vocabulary_parameter_patterns": vocabulary,
        "parameter_with_2_sub_params_cat_dim_0": halves,
        "parameter_with_sub_params": fused,
        "sub_param_shard_widths": widths,
        "pipeline_replicated_parameter_patterns": tied,
        "affine_map": {"version": _AFFINE_VERSION, "params": shared},
        "original_vocab_size": model.vocabulary.size,
        "padded_vocab_size": model.vocabulary.padded,
    }


def _are_halves(cut: Cut) -> bool:
    return len(cut.parts) == 2 and cut.parts[0] == cut.parts[1]


def _affine_map(shard: Shard, cut: Cut, size: int) -> dict[str, Any]:
    """Return DeepSpeed's affine map from each rank's rows to the parameter's rows, for a parameter
    of which several ranks have the same shard. The lists of patterns cannot express this
    (DeepSpeed's ``checkpoint/affine.py``)."""
    assert cut.dim == 0
    parts = cut.parts or (shard.full_shape[0],)
    here = range(len(parts)) if cut.held is None else cut.held
    inner = math.prod(shard.full_shape[1:])
    strides = [math.prod(shard.full_shape[axis + 1 :]) for axis in range(len(shard.full_shape))]
    # The parameter has only the held parts of the shard, so rows count from the first of these.
    first = sum(parts[: here[0]])
    ranks = {}
    for rank in range(size):
        pieces, taken, place = [], 0, {"tensor": (rank, size)}
        neighbours = range(rank - rank % cut.copies, rank - rank % cut.copies + cut.copies)
        for start, length in shard.ranges(place)[0]:
            pieces.append(
                {
                    "shape": [length, *shard.full_shape[1:]],
                    "source": [(start - first) * inner, strides],
                    "dest": [taken * inner, strides],
                    "locations": list(neighbours),
                }
            )
            taken += length
        ranks[rank] = {"shard_shape": list(shard.local_shape(place)), "pieces": pieces}
    held = sum(parts[part] for part in here)
    return {"logical_shape": [held, *shard.full_shape[1:]], "ranks": ranks}
