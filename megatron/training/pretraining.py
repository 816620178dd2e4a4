"""From a run to a trainer: model, data, checkpoints, logging and signals put together."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.engine.build import build_engine
from megatron.engine.deepspeed_folder import checkpoint_writer
from megatron.engine.environment import training_device
from megatron.engine.saving import hold_folder
from megatron.engine.train_engine import TrainEngine
from megatron.families import spec_of
from megatron.parallel.mesh import Mesh
from megatron.training import resume
from megatron.training.checkpoints import CheckpointManager
from megatron.training.guard import NonFiniteGuard
from megatron.training.plan import TrainingPlan
from megatron.training.profiling import profiling
from megatron.training.report import Reporter, say
from megatron.training.run import Run, run_data
from megatron.training.signals import Stopping, StopRequest
from megatron.training.trainer import Callback, Position, Trainer
from megatron.util.locks import Lock


def build_trainer(run: Run, mesh: Mesh, callbacks: Sequence[Callback] = ()) -> Trainer:
    """The trainer of a run.

    Args:
        run: what was asked for.
        mesh: the processes.
        callbacks: more of them, told of a step before those of the run.

    Raises:
        ValueError, OSError: data or checkpoints cannot be used; the message names them.
    """
    config, device = run.config, training_device()
    data = run_data(run)
    request = StopRequest(config.training.exit_duration_in_mins, run.launched)
    plan = TrainingPlan(config)
    save = config.checkpoint.save
    lock = hold_folder(save, mesh.world, device, say)
    checkpoint = resume.locate(config)
    spec = spec_of(config.model, config.parallel)
    engine = build_engine(config, run.content, spec, mesh, device)
    writer = checkpoint_writer(engine, run.content, run.tokenizer.save_pretrained)
    begin = resume.load(engine, plan, checkpoint)
    report = Reporter(run, plan, mesh, device, begin)
    checkpoints = CheckpointManager(writer, report, config.checkpoint.save_interval)
    check = config.training.check_for_nan_in_loss_and_grad
    position = Position(begin.iteration, begin.consumed_samples)
    return Trainer(
        engine,
        data,
        plan,
        (
            _Closing(engine, lock),
            *callbacks,
            Stopping(request, device, mesh.world.size, config.training.exit_interval),
            report,
            NonFiniteGuard(device, config.precision.fp16, check),
            checkpoints,
            *profiling(config, engine, checkpoints, begin.iteration),
        ),
        position,
        config.data.num_workers,
    )


class _Closing(Callback):
    """Lets go of what a run holds at its end.

    Not after an error: that waits for the device, and the device perhaps for another rank.
    """

    def __init__(self, engine: TrainEngine, lock: Lock | None) -> None:
        self._engine, self._lock = engine, lock

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """See :meth:`Callback.__exit__`."""
        if error_type is not None:
            return
        if self._lock is not None:
            self._lock.release()
        self._engine.close()
