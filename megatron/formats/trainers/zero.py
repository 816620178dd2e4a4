"""Checkpoints of transformers' Trainer and of accelerate with DeepSpeed's ZeRO: the weights in
float32, from the shards of the optimizer.

::

    checkpoint-500/config.json                 the model's; often next to model.safetensors, which
    checkpoint-500/latest                      has the same weights in 16 bits, and is not read
    checkpoint-500/global_step500/
        zero_pp_rank_0_mp_rank_00_model_states.pt (stage 3), mp_rank_00_model_states.pt (1 and 2)
        bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt, ...
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError
from megatron.checkpoint.folder import TRACKER
from megatron.formats.deepspeed_folders.engine_files import EngineFiles
from megatron.formats.deepspeed_folders.folder import (
    is_engine_folder,
    is_of_transformers,
    locate,
)
from megatron.formats.trainers.renamed import CONFIG, FileTensor, TrainerFolder


class ZeroFolder(TrainerFolder):
    """A folder ``global_step<N>`` of DeepSpeed with a Hugging Face config.json above it."""

    title = "checkpoint of transformers' Trainer with DeepSpeed"

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        folder = locate(path, wanted, TRACKER, is_engine_folder)
        return folder if folder is not None and is_of_transformers(folder) else None

    def _find_config(self) -> Path:
        return self.folder.parent / CONFIG

    def _list(self, content: Mapping[str, Any]) -> tuple[Path, Mapping[str, FileTensor]]:
        files = EngineFiles(self.folder)
        if files.tensor_size * files.pipeline_size != 1:
            raise CheckpointError(f"{self.folder} has files of several model-parallel ranks")
        shared = files.model_states().get("shared_params")
        copies = set(shared) if isinstance(shared, Mapping) else set()
        shapes = files.shapes_of(0)
        stored = {}
        for name in files.names():
            if name not in copies:
                theirs = name.removeprefix("module.")
                stored[theirs] = self._tensor(files, name, shapes.get(name))
        return self.folder, stored

    def _tensor(self, files: EngineFiles, name: str, shape: tuple[int, ...] | None) -> FileTensor:
        def read() -> Tensor:
            shares = files.shares(name, "weight", "{}.{}".format)
            if not shares or not isinstance(shares[0], Tensor):
                raise CheckpointError(f"{self.folder} has no weight of {name}")
            values = shares[0]
            if shape is not None and values.numel() != math.prod(shape):
                raise CheckpointError(
                    f"{self.folder}: {name} has {values.numel():,} elements, not {shape}"
                )
            return values if shape is None else values.reshape(shape)

        if shape is None:  # a buffer, or a parameter that is not trained
            values = read()
            return FileTensor(self.folder, tuple(values.shape), values.dtype, read)
        return FileTensor(self.folder, shape, torch.float32, read)
