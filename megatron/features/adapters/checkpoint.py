"""Checkpoints of adapters: the low-rank weights of a run with ``--lora``, and their base model.

A checkpoint of such a run contains the adapters, their optimizer moments, and a record of the base
model. As a :class:`Source` it provides the merged weights; :attr:`AdaptedSource.additions` provides
only the adapters.
"""

from __future__ import annotations

import os
import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.folder import find, may_be_ours
from megatron.checkpoint.manifest import BASE, verify
from megatron.checkpoint.reader import CheckpointReader
from megatron.checkpoint.slices import Slice
from megatron.checkpoint.source import FoundCheckpoint, Source, locate_checkpoint
from megatron.config import ModelConfig
from megatron.features.adapters.flags import AdapterConfig
from megatron.formats import linear_targets
from megatron.formats.derived import DerivedSource
from megatron.util.digests import digest

_ADAPTER = re.compile(r"(.+)\.lora_(?:([a-z]+)_)?(a|b|magnitude)")


@dataclass(frozen=True)
class BaseRecord:
    """Base model of adapters: its path, its format, and a digest of each of its parameters (whole,
    float32) by canonical name."""

    path: str
    title: str
    digests: Mapping[str, str]

    @classmethod
    def read(cls, folder: Path, place: Path | None = None) -> BaseRecord:
        """Read the record in a checkpoint's folder. ``place`` is the current path of the base if it
        has moved. Raises CheckpointError if the record is malformed."""
        path = folder / BASE
        try:
            record = cls(**read_json(path))
        except TypeError as error:
            raise CheckpointError(f"{path} does not describe a base: {error}") from None
        return record if place is None else replace(record, path=str(place.resolve()))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the record file."""
        return {"path": self.path, "title": self.title, "digests": dict(self.digests)}


class AdapterName(NamedTuple):
    """Parsed canonical name of an adapter's parameter. ``layers.3.attention.qkv.lora_q_a`` has the
    ``layer`` layers.3.attention.qkv, the ``part`` q and the ``kind`` a (one of a, b, magnitude).
    ``part`` is empty if the adapter applies to all rows of the weight."""

    layer: str
    part: str
    kind: str

    @property
    def of(self) -> str:
        """Name of the weight that the adapter changes."""
        return f"{self.layer}.weight"


def adapter_name(name: str) -> AdapterName | None:
    """Parse the canonical name of an adapter's parameter. Return None for other parameters."""
    match = _ADAPTER.fullmatch(name)
    return match and AdapterName(match[1], match[2] or "", match[3])


def rows_of_part(model: ModelConfig, part: str, rows: int) -> slice:
    """Return the rows of ``part`` in a fused matrix with ``rows`` rows, as a slice."""
    if part == "":
        return slice(0, rows)
    if part in ("gate", "up"):
        half = rows // 2
        return slice(0, half) if part == "gate" else slice(half, rows)
    if part not in ("q", "k", "v"):
        known = {target.part: target.rows for target in linear_targets(model)}
        return slice(*(known.get(part) or (0, 0)))
    attention = model.attention
    keys = attention.num_query_groups * attention.kv_channels
    # first key row: 0 in cross-attention, whose queries are in another matrix
    first = rows - 2 * keys
    assert first in (0, attention.query_rows), (part, rows, attention.query_rows, keys)
    starts = {"q": (0, first), "k": (first, keys), "v": (first + keys, keys)}
    start, length = starts[part]
    return slice(start, start + length)


def digests_of(source: Source, names: Iterable[str]) -> dict[str, str]:
    """Return the digests of the parameters ``names`` of a model, for a :class:`BaseRecord`."""
    return {name: digest(source.tensor(name).contiguous().numpy().data) for name in names}


class AdaptedSource(Source):
    """Model with adapters, presented as a checkpoint with merged weights. Each adapter format has a
    subclass. ``base`` overrides the base model recorded with the adapters.

    Attributes:
        base: the model without adapters.
        additions: the adapters by canonical name, and any other parameters trained with them.
            For this project's own checkpoints, also optimizer moments and the run's state.
        adapters: configuration of the adapters.
    """

    on_base = True
    base: Source
    additions: Source
    adapters: AdapterConfig

    def __init__(self, folder: Path, base: str | Path | None = None) -> None:
        super().__init__(folder)
        base_checkpoint = self.locate_base(folder, base)
        self.base = base_checkpoint.open(verify=False)
        self.base.require_model()

    @classmethod
    @abstractmethod
    def base_of(cls, folder: Path) -> str:
        """Return the path of the base model that is recorded with the adapters in a folder."""

    @classmethod
    def locate_base(cls, folder: Path, base: str | Path | None) -> FoundCheckpoint:
        """Find the base model of adapters: ``base``, or the recorded one. Raises CheckpointError if
        it does not exist."""
        path = cls.base_of(folder) if base is None else base
        checkpoint = locate_checkpoint(path) if os.path.exists(path) else None
        if checkpoint is None:
            where = "which is not there" if base is None else "where there is no checkpoint"
            raise CheckpointError(
                f"{folder} has adapters of the model {path}, {where}: name its place by "
                "--pretrained-checkpoint"
            )
        if checkpoint.folder.resolve() == folder.resolve():
            raise CheckpointError(f"{folder} has adapters that name themselves as their base")
        return checkpoint

    @classmethod
    def verify(
        cls, folder: Path, share: int = 0, shares: int = 1, base: str | Path | None = None
    ) -> None:
        cls.locate_base(folder, base).verify(share, shares)

    def names(self) -> Sequence[str]:
        mine, before = self.whole, self.base.names()
        if self.model.head != self.base.model.head:
            # Another head replaces the language model head, and is stored with the adapters.
            before = [name for name in before if not name.startswith("output_layer.")]
        return [*before, *(name for name in mine if name not in set(before))]

    def shape(self, name: str) -> tuple[int, ...]:
        return (self.additions if name in self.whole else self.base).shape(name)

    def kinds(self, name: str) -> Sequence[str]:
        return ("weight",)

    def dtype(self, name: str, kind: str = "weight") -> str:
        return "float32" if name in self.whole else self.base.dtype(name)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        if kind != "weight":
            raise CheckpointError(f"{self.folder} is merged with its base, and has no {kind}")
        trained = name in self.whole
        whole = (self.additions if trained else self.base).tensor(name)
        parts = self.adapted.get(name, {})
        if parts:
            whole = whole.clone()  # ``whole`` may be a view of a memory-mapped file
        for part, tensors in parts.items():
            rows = rows_of_part(self.model, part, whole.shape[0])
            values = {kind: self.additions.tensor(entry) for kind, entry in tensors.items()}
            whole[rows] = merged(whole[rows], self.scale_of(name, part), **values)
        return whole

    def alpha_of(self, weight: str, part: str) -> float:
        """Return the alpha of the adapter of ``part`` of a weight."""
        return self.adapters.alpha

    def scale_of(self, weight: str, part: str) -> float:
        """Return the scaling factor of the adapter of ``part`` of a weight."""
        rank = self.additions.shape(self.adapted[weight][part]["a"])[-2]
        return self.adapters.scale_of(rank, self.alpha_of(weight, part))

    def read(self, name: str, kind: str, wanted: Slice) -> Tensor:
        if name in self.adapted or name in self.whole or kind != "weight":
            return super().read(name, kind, wanted)
        return self.base.read(name, kind, wanted)

    @property
    def generation(self) -> dict[str, Any]:
        return super().generation or self.base.generation

    def copy_tokenizer(self, target: Path) -> bool:
        return super().copy_tokenizer(target) or self.base.copy_tokenizer(target)

    @cached_property
    def adapted(self) -> dict[str, dict[str, dict[str, str]]]:
        """Adapted weights: parameter names of the adapters, by weight, part and kind. Raises
        CheckpointError if a parameter is missing, or if the base has no such weight."""
        by_weight: dict[str, dict[str, dict[str, str]]] = {}
        for name in self.additions.names():
            parsed = adapter_name(name)
            if parsed is not None:
                parts = by_weight.setdefault(parsed.of, {})
                parts.setdefault(parsed.part, {})[parsed.kind] = name
        for weight in by_weight.keys() - set(self.base.names()):
            raise CheckpointError(
                f"{self.folder} has adapters of {weight}, which {self.base.folder} does not have"
            )
        needed = {"a", "b"} | ({"magnitude"} if self.adapters.use_dora else set())
        for weight, parts in by_weight.items():
            for part, kinds in parts.items():
                if kinds.keys() != needed:
                    raise CheckpointError(
                        f"{self.folder}: the adapter of {weight} {part}".rstrip()
                        + f" has {', '.join(sorted(kinds))} and must have "
                        f"{', '.join(sorted(needed))}: the file is incomplete, or of other "
                        "adapters than its configuration"
                    )
        return by_weight

    @cached_property
    def whole(self) -> list[str]:
        """Names of the parameters that were fully trained together with the adapters."""
        return [name for name in self.additions.names() if adapter_name(name) is None]


def merged(
    weight_OI: Tensor, scale: float, a: Tensor, b: Tensor, magnitude: Tensor | None = None
) -> Tensor:
    """Return a weight merged with its adapter: W + s B A, [O, I], or [E, O, I] for E experts. With
    DoRA (Liu et al. 2024, equation 5) its rows are rescaled to the norms ``magnitude`` [O]. Raises
    CheckpointError if the shapes do not fit."""
    *experts, outputs, inputs = weight_OI.shape
    rank = a.shape[-2]
    if a.shape != (*experts, rank, inputs) or b.shape != (*experts, outputs, rank):
        raise CheckpointError(
            f"an addition of shapes {tuple(b.shape)} x {tuple(a.shape)} does not fit a weight of "
            f"{tuple(weight_OI.shape)}"
        )
    add = torch.baddbmm if experts else torch.addmm
    whole = add(weight_OI, b, a, alpha=scale)
    if magnitude is None:
        return whole
    return whole * (magnitude / torch.linalg.vector_norm(whole, dim=1))[:, None]


class AdaptedCheckpoint(AdaptedSource):
    """Checkpoint of a run with ``--lora``, merged with its base model, which must be unchanged."""

    title = "adapters of this project"

    def __init__(self, folder: Path, base: str | Path | None = None) -> None:
        own = CheckpointReader(folder)
        self.record = BaseRecord.read(folder)
        super().__init__(folder, base)
        self.additions = own
        self.adapters = own.config.section(AdapterConfig)
        self.state, self.tokenizer = own.state, own.tokenizer
        self.model = replace(own.model, hf_architecture=self.base.model.hf_architecture)
        checkpoint = replace(own.config.checkpoint, save_optim=False)
        plain = own.config.with_sections(AdapterConfig())
        self.run = replace(plain, model=self.model, checkpoint=checkpoint)

    def read_as_weights(self, kind: str) -> None:
        self.additions.read_as_weights(kind)

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        if not may_be_ours(path):
            return None
        place = find(str(path), wanted)
        return place if place is not None and (place / BASE).is_file() else None

    @classmethod
    def family(cls, folder: Path, base: str | Path | None = None) -> str:
        return CheckpointReader.family(folder)

    @classmethod
    def base_of(cls, folder: Path) -> str:
        return BaseRecord.read(folder).path

    @classmethod
    def verify(
        cls, folder: Path, share: int = 0, shares: int = 1, base: str | Path | None = None
    ) -> None:
        verify(folder, share, shares)
        cls.verify_base(folder, share, shares, base)

    @classmethod
    def verify_base(
        cls, folder: Path, share: int = 0, shares: int = 1, base: str | Path | None = None
    ) -> None:
        """Verify the base. The checkpoint's own files are verified in :meth:`verify`."""
        super().verify(folder, share, shares, base)
        checkpoint = cls.locate_base(folder, base)
        check_base(BaseRecord.read(folder), checkpoint.open(verify=False), folder, share, shares)


def check_base(
    record: BaseRecord, source: Source, folder: Path, share: int = 0, shares: int = 1
) -> None:
    """Compare a base model with the record of the adapters in ``folder``. Checks every
    ``shares``-th parameter, starting with index ``share``. Raises CheckpointError if a parameter is
    missing or differs."""
    wanted = list(record.digests)[share::shares]
    names = set(source.names())
    different = [name for name in wanted if name not in names]
    present = (name for name in wanted if name in names)
    different += (
        name for name in present if digests_of(source, [name])[name] != record.digests[name]
    )
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise CheckpointError(
            f"{folder} has adapters of another model than {source.folder} is now (it was "
            f"{record.path}): {', '.join(different[:3])}{more} differ. Name the model that they "
            "were trained on by --pretrained-checkpoint"
        )


class RowLengths(DerivedSource):
    """Initial magnitudes of DoRA by parameter name: the norms of the rows of a model's weights."""

    title = "lengths of rows"

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        super().__init__(source.folder)
        self._source, self._names, self.model = source, names, source.model

    def names(self) -> Sequence[str]:
        return self._names

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        parsed = adapter_name(name)
        assert parsed is not None
        whole = self._source.tensor(parsed.of)
        rows = rows_of_part(self.model, parsed.part, whole.shape[0])
        return torch.linalg.vector_norm(whole[rows], dim=1)
