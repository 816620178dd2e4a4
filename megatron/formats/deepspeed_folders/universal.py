"""DeepSpeed's universal checkpoints: one folder per parameter, from which stock DeepSpeed loads
each rank's shard in any layout. Those of this project and of DeepSpeed's ds_to_universal are read.

::

    zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    zero/optimizer_state.pt
    mp_rank_00_model_states.pt                        counters, for loaders of ZeRO stages 1 and 2
    zero_pp_rank_0_mp_rank_00_model_states.pt         the same, for loaders of stage 3
    config.json, state.json, universal.json           this project's own; DeepSpeed ignores them

The format is that of DeepSpeed 0.19.8: ``checkpoint/ds_to_universal.py`` writes it, and
``checkpoint/universal_checkpoint.py`` (stages 1 and 2) and ``runtime/zero/stage3.py`` read it.
"""

from __future__ import annotations

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import CheckpointError, read_json, write_json
from megatron.checkpoint.folder import replace_folder, tag
from megatron.checkpoint.manifest import (
    CONFIG,
    KEPT_COUNTS,
    MORE_STATES,
    STATE,
    check_file,
    entries_of,
    file_facts,
)
from megatron.checkpoint.source import TOKENIZER, Source
from megatron.config import RunConfig
from megatron.formats.conversion.output import run_of, unfinished_folder
from megatron.formats.deepspeed_folders.engine_files import MOMENTS
from megatron.formats.deepspeed_folders.folder import (
    UNIVERSAL_SUFFIX,
    UNIVERSAL_TRACKER,
    NamedFolder,
    is_universal,
    locate,
)
from megatron.formats.deepspeed_folders.naming import EngineNaming, Naming
from megatron.formats.deepspeed_folders.neox import StoredTensors
from megatron.formats.features import whole_shards
from megatron.formats.universal_info import BUFFERS, UNIVERSAL_VERSION
from megatron.formats.unpickle import load_pickle
from megatron.parallel.shard import Shard
from megatron.util.files import sync_path
from megatron.util.progress import progress_bar

DEEPSPEED_VERSION = "0.19.8"
"""DeepSpeed release that defines this format. Loaders refuse folders without a version."""
MANIFEST = "universal.json"

_GROUPS = 64
"""Number of parameter groups to write, more than any script has. Loaders ignore the excess."""


class UniversalFolder(NamedFolder):
    """Universal checkpoint, converted from this project's own checkpoints, its engines' or
    Megatron-DeepSpeed's. Raises CheckpointError if a file is missing or malformed, or if the model
    is not supported."""

    title = "universal checkpoint of DeepSpeed"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._present = _parameters(folder / "zero")
        self._buffers: dict[str, Tensor] = {}
        # A file may be read several times, slice by slice, so keep the last ones.
        self._open = lru_cache(maxsize=4)(load_pickle)
        states = _read_model_states(folder)
        tensors = StoredTensors(
            lambda: list(self._present), lambda name: self._part(name, "weight").numel(), True
        )
        description = self._describe(states, tensors)
        if description.run is not None:
            self._buffers = _buffers(folder)
        if "embedding.word_embeddings.weight" in self._present:
            self._naming = Naming(self.model)
        elif description.foreign is not None:
            self._naming = description.foreign(self.model, list(self._present), folder)
        else:
            known = states.get("checkpoint_parallel_dimensions") or {}
            experts = (
                "cut" if description.run is None else description.run.parallel.experts_over_tensor
            )
            self._naming = EngineNaming(self.model, int(known.get("tp_degree", 1)), experts)
        if description.foreign is not None:
            self.state["optimizer_step"] = self._step()
            if not any(len(kinds) > 1 for kinds in self._present.values()):
                self.state = {}

    @classmethod
    def locate(cls, path: Path, wanted: str | None) -> Path | None:
        return locate(path, wanted, UNIVERSAL_TRACKER, is_universal, UNIVERSAL_SUFFIX)

    @classmethod
    def verify(cls, folder: Path, share: int = 0, shares: int = 1) -> None:
        """See :meth:`Source.verify`. Checkpoints written by DeepSpeed itself have no checksums."""
        path = folder / MANIFEST
        if not path.is_file():
            return
        content = read_json(path)
        files = content.get("files") if isinstance(content, dict) else None
        for name, facts in list(entries_of(path, files).items())[share::shares]:
            check_file(folder / name, facts)

    def kinds(self, name: str) -> Sequence[str]:
        self.shape(name)
        return self._present.get(self._naming.parts(name)[0], ["weight"])

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        self.shape(name)
        parts = [self._part(part, kind) for part in self._naming.parts(name)]
        try:
            return self._naming.whole(name, parts).float()
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {kind} of {error}") from None

    def _part(self, part: str, kind: str) -> Tensor:
        if part in self._buffers and part not in self._present:
            return self._buffers[part]
        path = self.folder / "zero" / part / _file_name(kind)
        content = self._open(path)
        # At stage 3 ds_to_universal writes a bare tensor.
        values = content.get("param") if isinstance(content, dict) else content
        if not isinstance(values, Tensor):
            raise CheckpointError(f"{path} has no tensor")
        return values

    def _step(self) -> int:
        files = (self.folder / "zero" / part / "step.pt" for part in self._present)
        path_of_state = next((path for path in files if path.is_file()), None)
        return 0 if path_of_state is None else int(load_pickle(path_of_state))


def _file_name(kind: str) -> str:
    return f"{'fp32' if kind == 'weight' else kind}.pt"


def _parameters(zero: Path) -> dict[str, list[str]]:
    """Return, by the folder's parameter names, the kinds of tensors stored for each."""
    parameters = {}
    for path in sorted(zero.iterdir()):
        if path.is_dir():
            files = set(os.listdir(path))
            parameters[path.name] = ["weight", *(m for m in MOMENTS if f"{m}.pt" in files)]
    if not parameters:
        raise CheckpointError(f"{zero} has no parameters")
    return parameters


def _read_model_states(folder: Path) -> dict[str, Any]:
    for pattern in ("mp_rank_*_model_states.pt", "*zero_pp_rank_0_mp_rank_*_model_states.pt"):
        for path in sorted(folder.glob(pattern)):
            content = load_pickle(path)
            if not isinstance(content, dict):
                raise CheckpointError(f"{path} is not a dictionary")
            return content
    raise CheckpointError(f"{folder} has no model states (mp_rank_00_model_states.pt)")


def _buffers(folder: Path) -> dict[str, Tensor]:
    """Return the buffers by canonical name. DeepSpeed's own conversion keeps them in the model
    states of each pipeline stage."""
    contents = map(load_pickle, sorted(folder.glob("mp_rank_*_model_states.pt")))
    return {
        name: values
        for content in contents
        if isinstance(content, dict) and isinstance(content.get(BUFFERS), dict)
        for name, values in content[BUFFERS].items()
        if isinstance(values, Tensor)
    }


def save_universal(source: Source, save: Path, stage: int = 1) -> Path:
    """Write ``global_step<N>_universal`` into a checkpoint folder, and return its path."""
    iteration = source.state.get("iteration", 0)
    folder = save / f"{tag(iteration)}{UNIVERSAL_SUFFIX}"
    write_universal(source, folder, stage)
    return folder


def write_universal(source: Source, folder: Path, stage: int = 1) -> None:
    """Write any checkpoint as a universal one, one parameter at a time. The complete folder is
    renamed into place, and ``latest_universal`` is updated. Loaders at ``stage`` 3 do not pad the
    vocabulary, so for them the token embedding keeps the run's padding. Raises CheckpointError if
    the source is damaged or has optimizer states that loaders do not support, and OSError if a file
    cannot be written. After an error nothing is left behind."""
    assert stage in (1, 2, 3)
    _check_states(source)
    with unfinished_folder(folder) as written:
        (written / "zero").mkdir()
        run = source.run or run_of(source)
        facts = _write_files(source, run, written, stage)
        write_json(written / MANIFEST, {"format": 1, "zero_stage": stage, "files": facts})
        replace_folder(written, folder, {UNIVERSAL_TRACKER: folder.name})


def _check_states(source: Source) -> None:
    kinds = {kind for name in source.names() for kind in source.kinds(name)}
    others = kinds - {"weight", *MOMENTS, *source.state.get(KEPT_COUNTS, {})}
    whole = source.run is not None and any(source.folder.glob(f"{MORE_STATES}-*"))
    if others or whole:
        name = "another optimizer" if source.run is None else source.run.optimizer.optimizer
        raise CheckpointError(
            f"{source.folder} has states of --optimizer {name} that universal checkpoints have no "
            f"place for ({', '.join(sorted(others)) or f'{MORE_STATES}-*.safetensors'}); to-hf and "
            "to-dcp write its weights"
        )


def _write_files(
    source: Source, run: RunConfig, written: Path, stage: int
) -> dict[str, dict[str, int | str]]:
    """Write all files except the manifest, and return the manifest's entries."""
    facts: dict[str, dict[str, int | str]] = {}

    def note(path: Path) -> None:
        sync_path(path)
        facts[str(path.relative_to(written))] = file_facts(path)

    def save(content: Any, path: Path) -> None:
        torch.save(content, path)
        note(path)

    shards = whole_shards(run.model)
    count = source.state.get("optimizer_step")
    step = torch.tensor(float(count)) if count else None
    for name in progress_bar("writing", source.names(), unit=" parameters"):
        place = written / "zero" / name
        place.mkdir()
        kinds = [kind for kind in source.kinds(name) if kind == "weight" or kind in MOMENTS]
        for kind in kinds:
            values = source.tensor(name, kind)
            if stage == 3:
                values = shards[name].cut(values)  # adds the padding
            save(
                {"param": values.contiguous(), **_how_to_cut(shards[name])},
                place / _file_name(kind),
            )
        if step is not None and len(kinds) > 1:
            save(step, place / "step.pt")
        sync_path(place)
    save(_optimizer_state(run, step, stage), written / "zero" / "optimizer_state.pt")
    sync_path(written / "zero")
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    state = {key: value for key, value in source.state.items() if key != "world_size"}
    save(_model_states(state, step), written / f"{prefix}mp_rank_00_model_states.pt")
    write_json(written / CONFIG, run.to_dict())
    write_json(written / STATE, state)
    source.copy_tokenizer(written / TOKENIZER)
    for path in (written / CONFIG, written / STATE, *(written / TOKENIZER).rglob("*")):
        if path.is_file():
            note(path)
    return dict(sorted(facts.items()))


def _how_to_cut(shard: Shard) -> dict[str, Any]:
    """Return the keys that tell DeepSpeed's loaders how to shard a parameter over tensor-parallel
    ranks, as Megatron's layers do. Return an empty dictionary if it is replicated."""
    cut = shard.over("tensor")
    if cut is None:
        return {}
    facts: dict[str, Any] = {"cat_dim": cut.dim}
    if len(cut.parts) == 2 and cut.parts[0] == cut.parts[1]:
        facts["param_n_sub_params"] = 2
    elif cut.parts:
        # DeepSpeed stores an object of its own class here. Loaders only use these attributes.
        shape = [*shard.canonical_shape]
        shape[cut.dim : cut.dim + 1] = [cut.parts]  # type: ignore[list-item]
        facts["sub_param_shape"] = Namespace(shape=tuple(shape), partition_dim=cut.dim)
    if cut.unpadded is not None:
        facts["vocab_tensor"] = True
    return facts


def _optimizer_state(run: RunConfig, step: Tensor | None, stage: int) -> dict[str, Any]:
    """Return the settings that all parameter groups share and that no schedule changes. The loading
    script sets learning rates and weight decay."""
    optimizer = run.optimizer
    shared: dict[str, Any] = {}
    if optimizer.optimizer == "adam":
        shared["betas"] = (optimizer.adam_beta1, optimizer.adam_beta2)
        shared["eps"] = optimizer.adam_eps
    content: dict[str, Any] = {
        "zero_stage": stage,
        "ds_version": DEEPSPEED_VERSION,
        "param_groups": [dict(shared) for _ in range(_GROUPS)],
    }
    if stage == 3:
        state = {0: {} if step is None else {"step": step}}
        content["optimizer_state_dict"] = {"state": state, "param_groups": [shared]}
    return content


def _model_states(state: dict[str, Any], step: Tensor | None) -> dict[str, Any]:
    """Return the content of a model states file: the script's client state, and the values that a
    loader requires besides parameters."""
    iteration = state.get("iteration", 0)
    samples = state.get("consumed_samples", 0)
    updates = iteration if step is None else math.floor(step)
    return {
        "module": {},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": iteration,
        "global_samples": samples,
        "skipped_steps": iteration - updates,
        # keys for DeepSpeed's own schedules and for torch's; each ignores the other's
        "lr_scheduler": {
            "last_batch_iteration": updates - 1,
            "last_epoch": updates,
            "_step_count": updates + 1,
        },
        "ds_version": DEEPSPEED_VERSION,
        "iteration": iteration,
        "consumed_samples": samples,
        "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
    }
