"""Save checkpoint folders with DeepSpeed's own engine: ``--checkpoint-format deepspeed``.

Stock DeepSpeed resumes from such a folder in the same layout, its ``ds_to_universal`` converts it,
and ``--load`` reads it in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import NotFiniteError, write_json
from megatron.checkpoint.folder import MEGATRON_TRACKER, TRACKER, replace_folder, tag
from megatron.checkpoint.source import TOKENIZER
from megatron.config import ConfigError
from megatron.engine.deepspeed_json import Json
from megatron.engine.saving import CheckpointWriter, SaveJob, kernel_state, ruined
from megatron.engine.state import holders
from megatron.engine.train_engine import TrainEngine
from megatron.formats.tensors import save_tensors
from megatron.formats.universal_info import (
    BUFFERS,
    COUNTERS,
    RUN,
    registered_parameters,
    universal_info,
)
from megatron.parallel.random import random_state
from megatron.util.files import sync_path
from megatron.util.secrets import without_secrets


class EngineFolderWriter(CheckpointWriter):
    """Writer that saves a run's checkpoints with DeepSpeed's engine. Raises ConfigError if experts
    are distributed over ranks, because the engine would save only one rank's."""

    def __init__(self, engine: TrainEngine, *others: Any) -> None:
        if engine.mesh.group("expert").size > 1:
            raise ConfigError(
                "--checkpoint-format deepspeed: DeepSpeed's engine saves the experts of its own "
                "layer only; with experts divided over ranks use --checkpoint-format safetensors, "
                "and then tools/convert_checkpoint.py to-universal or to-deepspeed"
            )
        super().__init__(engine, *others)

    def check(self, job: SaveJob) -> None:
        reason = ruined(self.engine)
        if reason is not None:
            raise NotFiniteError(reason)

    def write_own(self, job: SaveJob) -> None:
        write_engine_folder(self.engine, job.folder, job.state, self._universal_info)

    @cached_property
    def _universal_info(self) -> Json:
        engine = self.engine
        registered = registered_parameters(engine.layers).values()
        parts = [part for parts in registered for part in parts]
        return universal_info(parts, engine.config.model, engine.mesh.tensor.size)

    def complete(self, job: SaveJob) -> int:
        folder, final = job.folder, self.folder / tag(job.iteration)
        for name, content in self.descriptions(job).items():
            write_json(folder / name, content)
        self.save_tokenizer(folder / TOKENIZER)
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in files:
            sync_path(path)
        size = sum(path.stat().st_size for path in files)
        trackers = {MEGATRON_TRACKER: str(job.iteration), TRACKER: final.name}
        replace_folder(folder, final, trackers)
        return size


def write_engine_folder(
    engine: TrainEngine, folder: Path, state: dict[str, Any], info: Json
) -> None:
    """Write the engine's state into an existing folder. Collective: every rank must call it.
    ``state`` contains the counters of :class:`megatron.checkpoint.source.Source`, and ``info`` is
    the result of :func:`universal_info`. Raises OSError if a file cannot be written."""
    rank = engine.mesh.world.rank
    client: dict[str, Any] = {
        "iteration": state["iteration"],
        "consumed_samples": state["consumed_samples"],
        COUNTERS: without_secrets(state),
        RUN: without_secrets(engine.config.to_dict()),
        BUFFERS: {name: buffer.values.cpu() for name, buffer in engine.buffers.items()},
        "universal_checkpoint_info": info,
    }
    if engine.stage == 0:
        updated = dict(zip(engine.trained, holders(engine), strict=True))
        named = engine.engine.module.named_parameters()
        names = {updated[param]: name for name, param in named if param in updated}
        client["optimizer_parameters"] = [
            names[tensor] for group in engine.optimizer.param_groups for tensor in group["params"]
        ]
    with save_errors_at_end(engine.engine):
        engine.engine.save_checkpoint(
            str(folder.parent), tag=folder.name, client_state=client, save_latest=False
        )
    if engine.config.checkpoint.save_rng:
        save_tensors(random_state(), folder / f"random-{rank:05d}.safetensors")
    if history := kernel_state(engine):
        tensors = {key: values.contiguous() for key, values in history.items()}
        save_tensors(tensors, folder / f"{engine.kernels.file}-{rank:05d}.safetensors")


@contextmanager
def save_errors_at_end(engine: Any) -> Iterator[None]:
    """Postpone errors while DeepSpeed's engine writes a checkpoint. The first one is raised at the
    end of the block, and later files are skipped. DeepSpeed's ranks synchronize between files, so a
    rank that raised at once, as on a full disk, would leave the others waiting."""
    errors: list[tuple[str, Exception]] = []

    def postponed(write: Callable[..., object]) -> Callable[..., None]:
        def write_or_note(*args: Any, **options: Any) -> None:
            if errors:
                return
            try:
                write(*args, **options)
            except (OSError, RuntimeError) as error:  # torch.save raises both
                errors.append((str(options.get("path") or args[-1]), error))

        return write_or_note

    writer = engine.checkpoint_engine
    places = [(writer, "save"), (writer, "makedirs"), (engine, "_copy_recovery_script")]
    for place, name in places:
        setattr(place, name, postponed(getattr(place, name)))
    try:
        yield
    finally:
        for place, name in places:
            delattr(place, name)
    for path, error in errors:
        raise OSError(f"{path}: {error}") from error
