"""Reads universal checkpoints: those written here, and those of DeepSpeed's ds_to_universal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json
from megatron.checkpoint.manifest import check_file
from megatron.checkpoint.source import Source
from megatron.formats.deepspeed_folders.configuration import describe
from megatron.formats.deepspeed_folders.foreign import ForeignNaming
from megatron.formats.deepspeed_folders.layout import (
    UNIVERSAL_SUFFIX,
    UNIVERSAL_TRACKER,
    is_universal,
    locate,
)
from megatron.formats.deepspeed_folders.naming import (
    CanonicalNaming,
    EngineNaming,
    Naming,
    looks_canonical,
)
from megatron.formats.deepspeed_folders.universal_writer import MANIFEST
from megatron.formats.unpickle import load_pickle

_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


class UniversalFolder(Source):
    """A universal checkpoint of this project, of its engines or of Megatron-DeepSpeed.

    Args:
        folder: the checkpoint's folder (``.../global_step100_universal``).

    Raises:
        CheckpointError: a file is missing or malformed, or the network cannot be represented.
    """

    title = "universal checkpoint of DeepSpeed"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._present = _parameters(folder / "zero")
        states = _model_states(folder)
        found = describe(folder, states)
        self.run, self.model, self.tokenizer = found.run, found.model, found.tokenizer
        self.state = found.state
        self._naming: Naming
        if looks_canonical(self._present):
            self._naming = CanonicalNaming(self.model)
        elif found.foreign:
            self._naming = ForeignNaming(
                self.model, list(self._present), folder, found.split_biases
            )
        else:
            known = states.get("checkpoint_parallel_dimensions") or {}
            self._naming = EngineNaming(self.model, int(known.get("tp_degree", 1)))
        if found.foreign:
            self.state["optimizer_step"] = self._step()
            if not any(len(kinds) > 1 for kinds in self._present.values()):
                self.state = {}
        # The same pickle is asked for by every part that is read of it.
        self._open = lru_cache(maxsize=4)(load_pickle)

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """See :meth:`Source.locate`."""
        return locate(path, wanted, UNIVERSAL_TRACKER, is_universal, UNIVERSAL_SUFFIX)

    @classmethod
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        """See :meth:`Source.verify`; DeepSpeed's own have no checksums."""
        path = folder / MANIFEST
        if not path.is_file():
            return
        content = read_json(path)
        files = content.get("files") if isinstance(content, dict) else None
        if not isinstance(files, dict):
            raise CheckpointError(f"{path} is not a manifest")
        for name, facts in list(files.items())[share::shares]:
            check_file(folder / name, facts)

    def names(self) -> Sequence[str]:
        """See :meth:`Source.names`."""
        return list(self._naming.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """See :meth:`Source.shape`."""
        if name not in self._naming.shapes:
            raise CheckpointError(f"{self.folder} has no parameter {name}")
        return self._naming.shapes[name]

    def kinds(self, name: str) -> Sequence[str]:
        """See :meth:`Source.kinds`."""
        self.shape(name)
        return self._present.get(self._naming.parts(name)[0], ["weight"])

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """See :meth:`Source.tensor`."""
        self.shape(name)
        parts = [self._part(part, kind) for part in self._naming.parts(name)]
        try:
            return self._naming.whole(name, parts).float()
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {kind} of {error}") from None

    def _part(self, part: str, kind: str) -> Tensor:
        path = self._file(part, kind)
        content = self._open(path)
        # ds_to_universal leaves out the dictionary at stage 3.
        values = content.get("param") if isinstance(content, dict) else content
        if not isinstance(values, Tensor):
            raise CheckpointError(f"{path} holds no tensor")
        return values

    def _file(self, part: str, kind: str) -> Path:
        return self.folder / "zero" / part / f"{'fp32' if kind == 'weight' else kind}.pt"

    def _step(self) -> int:
        for part in self._present:
            path = self.folder / "zero" / part / "step.pt"
            if path.is_file():
                return int(load_pickle(path))
        return 0


def _parameters(zero: Path) -> dict[str, list[str]]:
    """The kinds that there are of each parameter, by the folder's names."""
    found = {}
    for path in sorted(zero.iterdir()):
        if path.is_dir():
            files = set(os.listdir(path))
            found[path.name] = ["weight", *(m for m in _MOMENTS if f"{m}.pt" in files)]
    if not found:
        raise CheckpointError(f"{zero} has no parameters")
    return found


def _model_states(folder: Path) -> dict[str, Any]:
    for pattern in ("mp_rank_*_model_states.pt", "*zero_pp_rank_0_mp_rank_*_model_states.pt"):
        for path in sorted(folder.glob(pattern)):
            content = load_pickle(path)
            if not isinstance(content, dict):
                raise CheckpointError(f"{path} holds no dictionary")
            return content
    raise CheckpointError(f"{folder} has no model states (mp_rank_00_model_states.pt)")
