"""``clean`` of ``tools/convert_checkpoint.py``: write the compressed model of a run with
``compression_training``, without training state (DeepSpeed's ``redundancy_clean``).

Weights get the values that the layers computed with: quantised, and zero where they are pruned.
Pruned rows and heads are removed if three conditions hold: the configuration lists their
``related_modules``, every block loses the same number, and a checkpoint format of the model
supports the new shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import MEGATRON_TRACKER
from megatron.checkpoint.source import Source
from megatron.config import ConfigError, ModelConfig
from megatron.config.flags import option
from megatron.features.compression.layers import (
    SCORES,
    CompressedLayer,
    compressed_layers,
    is_scores,
    masked,
    matches,
)
from megatron.features.compression.settings import (
    HEAD,
    PRUNING,
    ROW,
    WEIGHTS,
    Compression,
    CompressionConfig,
)
from megatron.features.compression.state import (
    FILE,
    overwritten,
    quantisations,
    schedule,
    unpacked,
    updates_in,
)
from megatron.formats.conversion.commands import LoadConfig, dtype_of, opened, parsed, required
from megatron.formats.conversion.output import published, write_checkpoint
from megatron.formats.derived import DerivedSource
from megatron.formats.features import layers_of
from megatron.formats.huggingface import architecture_of
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import shard_of
from megatron.util.errors import spelled
from megatron.util.progress import say

_PAIRS = {"attention.proj": "attention.qkv", "mlp.up": "mlp.down"}
"""For a layer in which heads or rows are pruned, the layer of the same block that shares them."""


@dataclass(frozen=True)
class CleanConfig:
    """Conversion of a compressed model to one without training state."""

    output: str | None = option(None)
    """Checkpoint folder to create. It can be the --load of to-hf, other tools or training."""
    keep_shapes: bool = option(False)
    """Keep pruned rows and heads as zeros, even if related_modules would allow removing them."""
    overwrite: bool = option(False)
    """Replace the checkpoint in --output."""


def clean(argv: Sequence[str]) -> None:
    """Run the ``clean`` command. Raises ConfigError if a flag is missing or wrong, and
    CheckpointError if the checkpoint is damaged or its run did not use compression."""
    checkpoint, config = parsed(
        argv, "clean", "Writes the model of a run with compression_training as it computes: with "
        "quantised and pruned weights.", LoadConfig, CleanConfig,
    )  # fmt: skip
    output = Path(required(config, "output"))
    source = CleanSource(opened(checkpoint), config.keep_shapes)
    for line in source.lines:
        print(line)
    with published(output, config.overwrite, source.folder, marks=(MEGATRON_TRACKER,)) as folder:
        write_checkpoint(folder, source, moments=False, progress=say)
    export = spelled("tools/convert_checkpoint.py to-hf")
    print(f"{output}: {source.folder} as it computes; {export} exports it")


class CleanSource(DerivedSource):
    """Compressed model, computed from a checkpoint of its run.

    Attributes:
        lines: messages about the changes, for the user.
    """

    title = "compressed model"

    def __init__(self, source: Source, keep_shapes: bool = False) -> None:
        super().__init__(source.folder)
        source.require_model()
        self._source, run = source, source.run
        chosen = None if run is None else run.section(CompressionConfig).chosen
        if run is None or chosen is None or not chosen.techniques:
            raise CheckpointError(f"{source.folder} is not of a run with compression_training")
        self._compression: Compression = chosen
        self._dtype, self._seed = getattr(torch, dtype_of(source)), run.training.seed
        self.run = run.with_sections(CompressionConfig())
        self.model, self.tokenizer, self.lines = source.model, source.tokenizer, list[str]()
        self._state: dict[str, Tensor] = {}
        for path in sorted(source.folder.glob(f"{FILE}-*.safetensors")):
            self._state |= load_file(path)
        self._updates = updates_in(self._state)
        self._whole_masks: dict[tuple[str, str], Tensor] = {}
        self._left: dict[str, tuple[int, Tensor]] = {}
        self._describe()
        if not keep_shapes:
            self._shrink()

    @cached_property
    def _layers(self) -> dict[str, CompressedLayer]:
        with torch.device("meta"):
            built = [(each.name, each.build()) for each in layers_of(self._source.model)]
        layers = [e for name, top in built for e in compressed_layers(self._compression, top, name)]
        for layer in layers:
            layer.mesh = Mesh()
        return {layer.name: layer for layer in layers}

    def _describe(self) -> None:
        technique = self._compression.techniques.get(WEIGHTS)
        if technique is None:
            return
        steps = quantisations(technique, self._updates)
        for group in technique.groups:
            bits = group.params["target_bits"]
            if technique.after_updates:
                if steps < 1:
                    continue
                bits, _ = schedule(technique, group.params, steps)
            self.lines.append(f"{group.place}: weights of {bits} bits")

    # Removal of pruned rows and heads.

    def _shrink(self) -> None:
        for kind, field in ((ROW, "ffn_hidden_size"), (HEAD, "num_attention_heads")):
            layers = [e for e in self._layers.values() if kind in e.uses and self._related(e, kind)]
            if not layers:
                continue
            masks = {layer.name: self._mask(layer, kind).view(-1).bool() for layer in layers}
            counts = {int(mask.sum()) for mask in masks.values()}
            fits = len(layers) == self._source.model.num_layers and len(counts) == 1
            model = self._smaller(kind, field, counts.pop()) if fits else None
            if model is None:
                self.lines.append(
                    f"{kind}: pruned weights are zeros in place; no format of this model can say "
                    "how many are left"
                )
                continue
            self.model = model
            self.lines.append(f"{kind}: {field} is {getattr(model.flags(), field)}")
            for layer in layers:
                self._leave_out(layer, kind, masks[layer.name])

    def _related(self, layer: CompressedLayer, kind: str) -> bool:
        """Return whether the group's ``related_modules`` include the layer of the same block that
        shares these rows or heads."""
        block, _, rest = layer.name.partition("attention." if kind == HEAD else "mlp.")
        own = ("attention." if kind == HEAD else "mlp.") + rest
        group, pair = layer.uses[kind].group, _PAIRS.get(own)
        return pair is not None and any(
            matches(pattern, layer.name) and any(matches(each, block + pair) for each in row)
            for pattern, row in zip(group.modules, group.related, strict=False)
        )

    def _smaller(self, kind: str, field: str, count: int) -> ModelConfig | None:
        """Return the model with ``count`` rows or heads, or None if no format supports that."""
        model, attention = self.model, self.model.attention
        plain = attention.num_query_groups == attention.num_attention_heads
        if (kind == ROW and model.mlp.gated) or (kind == HEAD and not plain):
            return None
        changes: dict[str, Any] = {field: count, "kv_channels": attention.kv_channels}
        if kind == HEAD:
            changes["num_query_groups"] = count
        try:
            smaller = replace(model.flags(), **changes).resolve()
            smaller = smaller.with_vocabulary(model.vocabulary.size)
            if architecture_of(model):
                architecture_of(smaller)
        except (ConfigError, ValueError):
            return None
        return smaller

    def _leave_out(self, layer: CompressedLayer, kind: str, mask: Tensor) -> None:
        """Record the rows or columns that remain in a layer and in the layer that shares them."""
        block = layer.name.rpartition("attention." if kind == HEAD else "mlp.")[0]
        kept = mask.nonzero().view(-1)
        if kind == ROW:
            self._left |= {f"{layer.name}.weight": (0, kept), f"{layer.name}.bias": (0, kept)}
            self._left[f"{block}mlp.down.weight"] = (1, kept)
            return
        attention = self._source.model.attention
        width, heads = attention.kv_channels, attention.num_attention_heads
        columns = (kept[:, None] * width + torch.arange(width)).view(-1)
        rows = torch.cat([columns + part * heads * width for part in range(3)])
        self._left[f"{layer.name}.weight"] = (1, columns)
        self._left |= {f"{block}attention.qkv.{kind}": (0, rows) for kind in ("weight", "bias")}

    # Weights.

    def names(self) -> Sequence[str]:
        return [name for name in self._source.names() if not is_scores(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        shape = list(self._source.shape(name))
        if name in self._left:
            dim, kept = self._left[name]
            shape[dim] = len(kept)
        return tuple(shape)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        module, _, last = name.rpartition(".")
        values = self._source.tensor(name)
        layer = self._layers.get(module)
        if layer is not None and last == "weight":
            values = self._weight(layer, values.to(self._dtype)).float()
        elif layer is not None and ROW in layer.uses:
            values = values * self._mask(layer, ROW).view_as(values)
        if name in self._left:
            dim, kept = self._left[name]
            values = values.index_select(dim, kept)
        return values

    def _weight(self, layer: CompressedLayer, values: Tensor) -> Tensor:
        if WEIGHTS in layer.uses:
            values = self._quantised(layer, values)
        for kind in PRUNING:
            if kind in layer.uses:
                values = masked(kind, values, self._mask(layer, kind))
        return values

    def _quantised(self, layer: CompressedLayer, values: Tensor) -> Tensor:
        technique, group = layer.uses[WEIGHTS].technique, layer.uses[WEIGHTS].group
        if not technique.after_updates:
            return layer.quantised({"": values}, group.params["target_bits"])[""]
        steps = quantisations(technique, self._updates)
        return overwritten(layer, {"": values}, self._seed, steps)[""] if steps > 0 else values

    def _mask(self, layer: CompressedLayer, kind: str) -> Tensor:
        """Return the mask for a whole matrix, float32."""
        key = layer.name, kind
        if key not in self._whole_masks:
            self._whole_masks[key] = self._new_mask(layer, kind)
        return self._whole_masks[key]

    def _new_mask(self, layer: CompressedLayer, kind: str) -> Tensor:
        if kind in layer.learned:
            return layer.mask_of(kind, self._source.tensor(f"{layer.name}.{SCORES[kind]}"))
        packed = self._state.get(f"{layer.name}:{kind}")
        if packed is None:  # the checkpoint was saved before the first step
            return layer.mask_of(kind, self._source.tensor(f"{layer.name}.weight"))
        shape = layer.shard_of_mask(kind, shard_of(layer.weights[""])).canonical_shape
        return unpacked(packed, shape).float()
