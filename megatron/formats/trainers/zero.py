"""Checkpoints of transformers' Trainer and of accelerate with DeepSpeed's ZeRO. The float32 weights
and Adam's moments are read from the optimizer's shards.

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
from megatron.formats.deepspeed_folders.folder import is_engine_folder, is_of_transformers, locate
from megatron.formats.trainers.renamed import CONFIG, FileTensor, TrainerFolder, TrainerStates


class ZeroFolder(TrainerFolder):
    """DeepSpeed's folder ``global_step<N>`` with a Hugging Face config.json above it."""

    title = "checkpoint of transformers' Trainer with DeepSpeed"

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        folder = locate(path, wanted, TRACKER, is_engine_folder)
        return folder if folder is not None and is_of_transformers(folder) else None

    def _find_config(self) -> Path:
        return self.folder.parent / CONFIG

    def _list(self, content: Mapping[str, Any]) -> tuple[Path, Mapping[str, FileTensor]]:
        self._files = files = EngineFiles(self.folder)
        if files.tensor_size * files.pipeline_size != 1:
            raise CheckpointError(f"{self.folder} has files of several model-parallel ranks")
        return self.folder, self._kind("weight")

    def _kind(self, kind: str) -> dict[str, FileTensor]:
        """Return the weights, or the moment ``kind`` of the trained weights."""
        files, stored = self._files, {}
        shared = files.model_states().get("shared_params")
        copies = set(shared) if isinstance(shared, Mapping) else set()
        shapes = files.shapes_of(0)
        for name in files.names():
            if name not in copies and (kind == "weight" or name in shapes):
                theirs = name.removeprefix("module.")
                stored[theirs] = self._tensor(name, kind, shapes.get(name))
        return stored

    def _list_states(self, content: Mapping[str, Any]) -> TrainerStates | str | None:
        files, states = self._files, self._files.model_states()
        try:
            kinds, step = files.moments(), files.optimizer_step()
            scheduler = states.get("lr_scheduler")
            last = scheduler.get("last_epoch") if isinstance(scheduler, Mapping) else None
            counters = {
                "iteration": int(states.get("global_steps", step)),
                "consumed_samples": int(states.get("global_samples", 0)), "optimizer_step": step,
            }  # fmt: skip
            last = None if last is None else int(last)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            reason = str(error).partition("\n")[0][:200]
            raise CheckpointError(
                f"{self.folder}: the optimizer's state is malformed ({reason})"
            ) from None
        if not kinds:
            return None
        return TrainerStates({kind: self._kind(kind) for kind in kinds}, counters, last)

    def _tensor(self, name: str, kind: str, shape: tuple[int, ...] | None) -> FileTensor:
        def read() -> Tensor:
            shares = self._files.shares(name, kind, "{}.{}".format)
            if not shares or not isinstance(shares[0], Tensor):
                raise CheckpointError(f"{self.folder} has no {kind} of {name}")
            values = shares[0]
            if shape is not None and values.numel() != math.prod(shape):
                raise CheckpointError(
                    f"{self.folder}: {name} has {values.numel():,} elements, not {shape}"
                )
            return values if shape is None else values.reshape(shape)

        if shape is None:  # a buffer or an untrained parameter
            values = read()
            return FileTensor(self.folder, tuple(values.shape), values.dtype, read)
        return FileTensor(self.folder, shape, torch.float32, read)
