"""A checkpoint of any format, seen as whole parameters with canonical names."""

from __future__ import annotations

import dataclasses
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.slices import Slice
from megatron.config import (
    CheckpointConfig,
    ConfigError,
    ModelConfig,
    ModelFlags,
    PrecisionConfig,
    RunConfig,
    TokenizerConfig,
)
from megatron.util.progress import progress_bar

TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files in checkpoints that this project writes."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes in which other programs keep weights, as torch and config.json call them."""


class Source(ABC):
    """A checkpoint that is being read; a class per format.

    Attributes:
        title: what the format is called in messages.
        folder: where it is (or the file, for formats of one file).
        model: the network, with its vocabulary.
        tokenizer: how to get its tokenizer; None when the checkpoint does not say.
        run: configuration of the run that wrote it; None when the checkpoint does not say.
        state: ``iteration``, ``consumed_samples``, ``optimizer_step``, ``loss_scaler``; empty when
            the checkpoint holds weights only, and training starts at the beginning.
        notes: what was decided where the checkpoint does not say, a line each.
        refusal: why no model of ours can be made of it; None when one can.
    """

    title: ClassVar[str]
    folder: Path
    model: ModelConfig
    tokenizer: TokenizerConfig | None = None
    run: RunConfig | None = None
    state: dict[str, Any]
    notes: Sequence[str] = ()
    refusal: str | None = None

    @classmethod
    @abstractmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        """Where under ``path`` a checkpoint of this format is.

        Args:
            path: one checkpoint, or a folder of several with a tracker that names the newest.
            wanted: a tag or an iteration; None for the newest.

        Returns:
            None when there is no checkpoint of this format at all.

        Raises:
            CheckpointError: there are some, but not the wanted one.
        """

    @classmethod
    def family(cls, folder: Path) -> str:
        """The family of the model in what :meth:`locate` found, without reading weights.

        Raises:
            CheckpointError: a file is missing or malformed.
        """
        return ModelConfig.family

    def __init__(self, folder: Path) -> None:
        """Opens what :meth:`locate` found.

        Raises:
            CheckpointError: a file is missing or malformed, or the network cannot be represented.
        """
        self.folder, self.state = folder, {}

    def require_model(self) -> None:
        """Makes sure that a model can be made of it.

        Raises:
            CheckpointError: none can; it can be inspected.
        """
        if self.refusal is not None:
            raise CheckpointError(f"{self.folder}: {self.refusal}")

    @classmethod  # noqa: B027
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        """Compares the files with their checksums, where the format has them.

        Args:
            folder: what :meth:`locate` found.
            share: check every ``shares``-th file only, from this one on, so that ranks can divide
                them.
            shares: number of ranks that divide the files.

        Raises:
            CheckpointError: a file is missing or damaged.
        """

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Canonical names of the parameters, in the order of the layers."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole parameter, without padding."""

    @abstractmethod
    def kinds(self, name: str) -> Sequence[str]:
        """``weight`` and the moments (``exp_avg``, ...) that there are of a parameter."""

    def dtype(self, name: str, kind: str = "weight") -> str:
        """Dtype in which a tensor is stored, as torch calls it."""
        return "float32"

    @abstractmethod
    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """A whole parameter, or one of its moments, without padding, float32, on the CPU.

        Raises:
            CheckpointError: it is missing or malformed; the message names the file.
        """

    def read(self, name: str, kind: str, wanted: Slice) -> Tensor:
        """A slice of a parameter, flat, float32; formats that can read it alone override this.

        Raises:
            CheckpointError: it is missing or malformed; the message names the file.
        """
        whole = self.tensor(name, kind)
        if tuple(whole.shape) != wanted.shape:
            raise CheckpointError(
                f"{self.folder}: {kind} of {name} has the shape {tuple(whole.shape)}, the model "
                f"needs {wanted.shape}"
            )
        return wanted.cut(whole)

    def check_tensors(self) -> None:
        """Makes sure that every tensor can be read, by reading it.

        Raises:
            CheckpointError: one is missing or malformed.
        """
        for name in progress_bar("reading", self.names(), unit=" parameters"):
            for kind in self.kinds(name):
                self.tensor(name, kind)

    def copy_tokenizer(self, target: Path) -> bool:
        """Copies the tokenizer's files, in Hugging Face's form, to a folder that is not there yet.

        Returns:
            Whether the checkpoint has them, in its folder ``tokenizer``.
        """
        own = self.folder / TOKENIZER
        if own.is_dir():
            shutil.copytree(own, target)
        return own.is_dir()


def resolved(flags: ModelFlags, where: Path) -> ModelConfig:
    """The network that another program's checkpoint describes by flags.

    Args:
        flags: the flags.
        where: the file, for messages.

    Raises:
        CheckpointError: there is no such network here.
    """
    try:
        return flags.resolve()
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def run_of(source: Source, moments: bool = True) -> RunConfig:
    """The configuration that a converted checkpoint is saved with: that of its run, as far as the
    source knows it."""
    run = source.run
    if run is None:
        # What it is stored in is what it will be exported in.
        dtype = source.dtype(source.names()[0])
        run = RunConfig(
            source.model,
            tokenizer=source.tokenizer or TokenizerConfig(),
            precision=PrecisionConfig(bf16=dtype == "bfloat16", fp16=dtype == "float16"),
        )
    checkpoint = dataclasses.replace(
        run.checkpoint, save_optim=run.checkpoint.save_optim and moments
    )
    if source.run is None:
        checkpoint = CheckpointConfig(save_optim=moments)
    run = dataclasses.replace(run, model=source.model, checkpoint=checkpoint)
    return run.with_vocabulary(source.model.vocabulary.size)
