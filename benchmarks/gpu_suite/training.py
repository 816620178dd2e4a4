"""One training cell, in a worker: predicts its memory, measures it, and again with half the micro
batch if the device has too little."""

from __future__ import annotations

import dataclasses
import gc
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contestants.flags import flags_of
from contestants.registry import Contestant, contestant, is_ours
from contestants.setting import Setting

from gpu_suite.ladder import Cell
from gpu_suite.shapes import SHAPES
from gpu_suite.stepping import Stepping, split
from megatron.apps.planning.memory import Memory, peak_memory
from megatron.engine.environment import training_device
from megatron.features.context.flags import LongContextConfig
from megatron.kernels.switches import switched

Found = dict[str, Any]
COMPILED_SHARE = 0.5
"""An estimate, low rather than high: what is refused is never tried."""


class CannotFit(Exception):
    """The prediction exceeds the device's memory; the message has both numbers."""


@dataclass(frozen=True)
class Room:
    """Memory of the device in bytes, None where that is no question (a CPU in a trial)."""

    total: int | None

    @classmethod
    def of_device(cls) -> Room:
        """Return the numbers of the GPU of this process."""
        if not torch.cuda.is_available():
            return cls(None)
        return cls(torch.cuda.get_device_properties(0).total_memory)

    def refuse(self, eager: Memory) -> None:
        """Raises CannotFit if a run that needs ``eager`` without torch.compile needs more even
        where compiled layers keep only :data:`COMPILED_SHARE` of its activations."""
        state = eager.total - eager.activations
        needed = state + COMPILED_SHARE * eager.activations
        if self.total is not None and needed > self.total:
            raise CannotFit(
                f"predicted to need {needed / 1e9:.1f} GB ({state / 1e9:.1f} GB of state), the "
                f"device has {self.total / 1e9:.1f} GB; not started"
            )


def predicted(entrant: Contestant, setting: Setting) -> Memory:
    """Memory of the trainer at the peak of a step, of layers that are not compiled. Raises
    ValueError if its flags are wrong, and SystemExit if one is unknown."""
    from megatron.run.run import parse_run

    run = parse_run(None, flags_of(setting, entrant.stage, entrant.flags), setting.family)
    layout = dataclasses.replace(
        run.config.layout(run.content), micro_batches=(setting.micro_batches,)
    )
    saving = run.config.section(LongContextConfig)
    return peak_memory(
        run.config.model, layout, setting.micro_batch, setting.micro_batches, saving=saving
    )


def halved(setting: Setting) -> Setting | None:
    """The same step with half the micro batch; None if that is one sample."""
    if setting.micro_batch < 2:
        return None
    smaller = setting.micro_batch // 2
    samples = setting.micro_batch * setting.micro_batches
    return dataclasses.replace(setting, micro_batch=smaller, micro_batches=samples // smaller)


def train(cell: Cell, trace: Path, about: Found, room: Room) -> Found:
    """Measures a cell; with ``failed``, ``missing`` or ``cannot_fit`` if that was not possible."""
    entrant, setting = contestant(cell.contestant), cell.setting
    missing = entrant.missing()
    found: Found = {"command": command(cell, entrant, setting), "numerics": entrant.numerics}
    if missing:
        return found | {"missing": f"{', '.join(missing)} not installed"}
    smaller = halved(setting)
    if is_ours(cell.contestant):
        found["predicted_bytes"] = predicted(entrant, setting).total
        try:
            room.refuse(predicted(entrant, smaller or setting))
        except CannotFit as error:
            return found | {"cannot_fit": str(error)}
    why = _measure(cell, entrant, setting, found, trace, about)
    if why is not None and smaller is not None:
        found |= {"halved": why, "command": command(cell, entrant, smaller)}
        why = _measure(cell, entrant, smaller, found, trace, about)
    if why is not None:
        found["failed"] = f"out of memory: {why}"
    return found


def _measure(
    cell: Cell, entrant: Contestant, setting: Setting, found: Found, trace: Path, about: Found
) -> str | None:
    """Adds what is measured to ``found``; why there was too little memory, or None."""
    os.environ.pop("MASTER_PORT", None)
    torch.set_num_threads(setting.threads)
    stepping = Stepping(SHAPES[cell.shape].steps, trace if cell.trace else None, about)
    found["setting"] = dataclasses.asdict(setting)
    why = None
    try:
        with switched(**dict.fromkeys(cell.without, False)):
            entrant.run(setting, stepping.after_step)
    except RuntimeError as error:
        if not _no_memory(error):
            raise
        why = str(error).splitlines()[0][:200]
    if why is not None:
        # Only here: until its block ends, an error keeps the frames in which the model is.
        del stepping
        free()
        return why
    found |= {
        "rounds": stepping.rounds,
        "losses": stepping.losses,
        "grad_norms": stepping.grad_norms,
    }
    if cell.trace:
        found["trace"] = split(trace)
    return None


def _no_memory(error: RuntimeError) -> bool:
    """Triton and cuBLAS have no class for it."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or any(
        words in said for words in ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def command(cell: Cell, entrant: Contestant, setting: Setting) -> str:
    """Return the command line of the same training, or, of a peer, of the same measurement."""
    if is_ours(cell.contestant):
        flags = flags_of(setting, entrant.stage, entrant.flags)
        return f"pretrain_{setting.family}.py {shlex.join(flags)}"
    return f"python benchmarks/gpu.py --cells {cell.name}"


def free() -> int:
    """Gives all memory back that nothing refers to; bytes on the GPU that are still in use."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        # Code objects are shared by the variants: compiled code of the last one counts against the
        # number of times that the next one may compile.
        compiler.reset()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    gc.collect()
    if training_device().type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
