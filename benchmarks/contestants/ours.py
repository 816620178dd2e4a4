"""This trainer, as its command runs it: flags, loader, engine and loop."""

from __future__ import annotations

from contextlib import nullcontext

from contestants.drawn import drawn_on_device
from contestants.flags import flags_of
from contestants.registry import AfterStep, Contestant, NoMoreSteps
from contestants.setting import Setting
from megatron.engine.environment import deterministic_kernels, distributed
from megatron.run.run import parse_run
from megatron.training.build import build_trainer
from megatron.training.trainer import Callback, Step, Trainer


class Steps(Callback):
    """Tells of every step, and stops the training when nobody wants another one."""

    def __init__(self, after_step: AfterStep) -> None:
        self.tell, self.ended = after_step, False

    def after_step(self, trainer: Trainer, step: Step) -> None:
        """See `Callback.after_step`."""
        try:
            self.tell(step.result.loss, step.result.grad_norm)
        except NoMoreSteps:
            self.ended = True

    def reason_to_stop(self, trainer: Trainer) -> str | None:
        """See `Callback.reason_to_stop`."""
        return "the end of the measurement" if self.ended else None


def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Trains by ``Trainer.fit``."""
    flags = flags_of(setting, contestant.stage, contestant.flags)
    asked = parse_run(None, flags, setting.family)
    weights = nullcontext() if setting.folder else drawn_on_device()
    with deterministic_kernels(asked.config), distributed(asked.config.parallel) as mesh:
        with weights:
            trainer = build_trainer(asked, mesh, [Steps(after_step)])
        trainer.fit()
