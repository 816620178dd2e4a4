"""What a run does about saves that fail."""

from types import SimpleNamespace

import pytest

from megatron.checkpoint.files import CheckpointError
from megatron.config import CheckpointConfig
from megatron.engine.saving import SaveResult
from megatron.training.checkpoints import CheckpointManager


class Writer:
    """Fails every save; its result is there at once, or only when it is waited for."""

    def __init__(self, quick, fails=True, **options):
        self.options = CheckpointConfig(save="somewhere", **options)
        self.quick, self.fails = quick, fails
        self.saves, self.pending = [], []

    def save(self, iteration, counters):
        self.saves.append(iteration)
        error = CheckpointError("the disk is full") if self.fails else None
        self.pending.append(SaveResult(iteration, error, 0.0, 0.0))

    def finished(self, wait=False):
        if not (wait or self.quick):
            return []
        found, self.pending = self.pending, []
        return found

    def close(self):
        return self.finished(wait=True)


class Report:
    def say(self, text):
        pass

    def save(self, iteration, samples, values):
        pass


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_agree_on_saving_again(fails):
    """A stop at a step that is being saved: whether this rank has heard of the failure already must
    not decide, since saving is collective."""
    entered = []
    for quick in (True, False):
        writer = Writer(quick, fails)
        saves = CheckpointManager(writer, Report())
        saves.save(4, 16)
        saves.save(4, 16)
        entered.append(writer.saves)
    assert entered[0] == entered[1] == ([4, 4] if fails else [4])


def test_only_the_last_failure_fails_the_run():
    writer = Writer(quick=True)
    saves = CheckpointManager(writer, Report())
    saves.save(2, 8)
    with pytest.raises(CheckpointError, match="disk is full"), saves:
        pass
    with pytest.raises(MemoryError), saves:  # which came first
        raise MemoryError
    writer.fails = False
    with saves:
        saves.save(4, 16)


@pytest.mark.parametrize("asked, saved", [(True, [0]), (False, [])])
def test_the_initial_state_is_saved_if_asked_for(asked, saved):
    writer = Writer(quick=True, fails=False, save_init=asked)
    saves = CheckpointManager(writer, Report())
    for iteration in range(3):
        saves.before_step(SimpleNamespace(iteration=iteration, consumed_samples=4 * iteration))
    assert writer.saves == saved
