"""Writes DeepSpeed's universal checkpoints: a folder per parameter, from which stock DeepSpeed cuts
what each rank of any layout needs.

::

    zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt
    zero/optimizer_state.pt
    mp_rank_00_model_states.pt                        counters, for loaders of ZeRO stages 1 and 2
    zero_pp_rank_0_mp_rank_00_model_states.pt         the same, for loaders of stage 3
    config.json, state.json, universal.json           this project's own; DeepSpeed ignores them

The format is DeepSpeed 0.19.8's: ``checkpoint/ds_to_universal.py`` writes it, and
``checkpoint/universal_checkpoint.py`` (stages 1 and 2) and ``runtime/zero/stage3.py`` read it.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.files import write_json
from megatron.checkpoint.folder import replace_folder, tag, unfinished_folder
from megatron.checkpoint.manifest import CONFIG, STATE, file_facts
from megatron.checkpoint.source import TOKENIZER, Source, run_of
from megatron.config import RunConfig
from megatron.engine.universal_info import UNIVERSAL_VERSION
from megatron.formats.deepspeed_folders.layout import UNIVERSAL_SUFFIX, UNIVERSAL_TRACKER
from megatron.formats.deepspeed_folders.parameters import whole_shards
from megatron.parallel.shard import Shard
from megatron.util.files import sync_path
from megatron.util.progress import progress_bar

DEEPSPEED_VERSION = "0.19.8"
"""The release whose format this is; loaders refuse folders without a version."""
MANIFEST = "universal.json"
_GROUPS = 64
"""A loader pairs its groups of parameters with the folder's, one by one, and leaves what has no
partner unloaded, so there are more than anybody has."""


def save_universal(source: Source, save: Path, stage: int = 1) -> Path:
    """Writes ``global_step<N>_universal`` into a folder of checkpoints; see
    :func:`write_universal`."""
    iteration = source.state.get("iteration", 0)
    folder = save / f"{tag(iteration)}{UNIVERSAL_SUFFIX}"
    write_universal(source, folder, stage)
    return folder


def write_universal(
    source: Source,
    folder: Path,
    stage: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> None:
    """Writes any checkpoint as a universal one, a parameter at a time.

    It appears by a rename when it is complete and on the disk; then ``latest_universal`` beside it
    names it.

    Args:
        source: what is written.
        folder: the universal checkpoint; one that has this name already is replaced.
        stage: ZeRO stage of the loaders: 1 (or 2) or 3. A loader of stage 3 has no step that pads
            the vocabulary, so for it the token table has as many rows as in the run.
        progress: called with a line about each parameter.

    Raises:
        CheckpointError: the source is damaged.
        OSError: a file cannot be written; nothing is left behind.
    """
    assert stage in (1, 2, 3)
    with unfinished_folder(folder) as written:
        (written / "zero").mkdir()
        run = source.run or run_of(source)
        facts = _write_files(source, run, written, stage, progress)
        write_json(written / MANIFEST, {"format": 1, "zero_stage": stage, "files": facts})
        replace_folder(written, folder, {UNIVERSAL_TRACKER: folder.name})


def _write_files(
    source: Source,
    run: RunConfig,
    written: Path,
    stage: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, int | str]]:
    """Everything but the manifest, whose entries it returns."""
    facts: dict[str, dict[str, int | str]] = {}

    def note(path: Path) -> None:
        sync_path(path)
        facts[str(path.relative_to(written))] = file_facts(path)

    def save(content: Any, path: Path) -> None:
        torch.save(content, path)
        note(path)

    shards = whole_shards(run.model)
    step = _optimizer_step(source)
    for name in progress_bar("writing", source.names(), unit=" parameters"):
        place = written / "zero" / name
        place.mkdir()
        kinds = source.kinds(name)
        for kind in kinds:
            values = source.tensor(name, kind)
            if stage == 3:
                values = shards[name].cut(values)  # with the padding
            file = place / f"{'fp32' if kind == 'weight' else kind}.pt"
            save({"param": values.contiguous(), **how_to_cut(shards[name])}, file)
        if step is not None and len(kinds) > 1:
            save(step, place / "step.pt")
        sync_path(place)
        progress(f"{name}: {', '.join(kinds)}")
    save(_optimizer_state(run, step, stage), written / "zero" / "optimizer_state.pt")
    sync_path(written / "zero")
    prefix = "zero_pp_rank_0_" if stage == 3 else ""
    state = {key: value for key, value in source.state.items() if key != "world_size"}
    save(_model_states(state, step), written / f"{prefix}mp_rank_00_model_states.pt")
    write_json(written / CONFIG, run.to_dict())
    write_json(written / STATE, state)
    source.copy_tokenizer(written / TOKENIZER)
    own = [written / CONFIG, written / STATE, *(written / TOKENIZER).rglob("*")]
    for path in own:
        if path.is_file():
            note(path)
    return dict(sorted(facts.items()))


def how_to_cut(shard: Shard) -> dict[str, Any]:
    """What a file says so that DeepSpeed's loaders cut the parameter over tensor-parallel ranks as
    Megatron's layers do. Loaders take a parameter of equal shape as it is, so what every rank holds
    whole needs no words."""
    cut = shard.over("tensor")
    if cut is None:
        return {}
    found: dict[str, Any] = {"cat_dim": cut.dim}
    if len(cut.parts) == 2 and cut.parts[0] == cut.parts[1]:
        found["param_n_sub_params"] = 2
    elif cut.parts:
        # DeepSpeed's own object here has the same attributes; a reader needs no others.
        shape = [*shard.canonical_shape]
        shape[cut.dim : cut.dim + 1] = [cut.parts]  # type: ignore[list-item]
        found["sub_param_shape"] = Namespace(shape=tuple(shape), partition_dim=cut.dim)
    if cut.unpadded is not None:
        found["vocab_tensor"] = True
    return found


def _optimizer_step(source: Source) -> Tensor | None:
    """Number of updates as torch's optimizers keep it; None for those that do not count."""
    step = source.state.get("optimizer_step")
    return None if not step else torch.tensor(float(step))


def _optimizer_state(run: RunConfig, step: Tensor | None, stage: int) -> dict[str, Any]:
    """What all parameters have in common.

    Only what all groups of parameters share, and no schedule changes: learning rates, and which
    parameters decay by how much, are the loading script's to say, whose groups may be others.
    """
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
    """What a loader wants besides the parameters, and what its script gets as client state."""
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
        # For DeepSpeed's own schedules and for torch's; both take what they know.
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
