"""Reads the folders that DeepSpeed's engines save, whatever their layout and stage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.source import Source
from megatron.formats.deepspeed_folders.configuration import describe
from megatron.formats.deepspeed_folders.files import EngineFiles
from megatron.formats.deepspeed_folders.foreign import ForeignNaming
from megatron.formats.deepspeed_folders.layout import is_engine_folder, locate
from megatron.formats.deepspeed_folders.naming import EngineNaming, RankNaming


class DeepSpeedFolder(Source):
    """A folder of this project's ``--checkpoint-format deepspeed``, of Megatron-DeepSpeed (BLOOM)
    or of GPT-NeoX.

    Weights are those that the optimizer updates, in float32, where there are ZeRO files.

    Args:
        folder: the checkpoint's folder (``.../global_step100``).

    Raises:
        CheckpointError: a file is missing or malformed, or the network cannot be represented.
    """

    title = "checkpoint of DeepSpeed's engine"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = EngineFiles(folder)
        found = describe(folder, self._files.model_states())
        self.run, self.model, self.tokenizer = found.run, found.model, found.tokenizer
        self.state = found.state
        self._naming: RankNaming = EngineNaming(self.model, self._files.tensor_size)
        if found.foreign:
            foreign = ForeignNaming(self.model, self._files.names(), folder, found.split_biases)
            self._naming = foreign
            self.state["optimizer_step"] = self._files.optimizer_step()
        self._moments = self._files.moments()
        if found.foreign and not self._moments:
            self.state = {}

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """See :meth:`Source.locate`."""
        return locate(path, wanted, TRACKER, is_engine_folder)

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
        return ["weight", *self._moments]

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """See :meth:`Source.tensor`."""
        self.shape(name)
        naming, found = self._naming, []
        for part in naming.parts(name):
            shares = self._files.shares(part, kind, naming.registered_name)
            if shares is None:
                raise CheckpointError(f"{self.folder} has no {kind} of {name} ({part})")
            found.append(shares)
        try:
            return naming.join(name, kind, found).float()
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {kind} of {error}") from None
