"""What a run does about saves that fail."""

from types import SimpleNamespace

import pytest

from megatron.checkpoint.files import CheckpointError, NotFiniteError
from megatron.config import CheckpointConfig
from megatron.engine.saving import SaveResult
from megatron.training.checkpoints import CheckpointManager


class Writer:
    """Fails every save; its result is there at once, or only when it is waited for."""

    in_background = False

    def __init__(self, quick, fails=True, error=None, published=False, **options):
        self.options = CheckpointConfig(save="somewhere", **options)
        self.quick, self.fails, self.published = quick, fails, published
        self.error = error or CheckpointError("the disk is full")
        self.saves, self.pending = [], []

    def save(self, iteration, counters):
        self.saves.append(iteration)
        error = self.error if self.fails else None
        self.pending.append(SaveResult(iteration, error, 0.0, 0.0, published=self.published))

    def finished(self, wait=False):
        if not (wait or self.quick):
            return []
        found, self.pending = self.pending, []
        return found

    def close(self):
        return self.finished(wait=True)


class Report:
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def event(self, kind, iteration, samples, values):
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


def save_all(saves, iterations):
    """Which iterations were saved until an error, and that error."""
    for number, iteration in enumerate(iterations):
        try:
            saves.save(iteration, 4 * iteration)
        except CheckpointError as error:
            return list(iterations)[: number + 1], str(error)
    return list(iterations), None


@pytest.mark.parametrize("options, last", [({}, 3), ({"max_failed_saves": 5}, 5)])
def test_saves_that_fail_in_a_row_end_the_run(options, last):
    saves = CheckpointManager(Writer(quick=True, **options), Report(), newest="save/global_step0")
    done, error = save_all(saves, range(1, 20))
    assert done == list(range(1, last + 1))
    assert f"{last} saves in a row failed, of iterations 1, 2, 3" in error
    assert "the disk is full; the last good checkpoint is save/global_step0" in error


def test_saves_may_fail_without_limit_or_not_in_a_row():
    assert (
        save_all(CheckpointManager(Writer(True, max_failed_saves=0), Report()), range(50))[1]
        is None
    )
    writer = Writer(quick=True)
    saves = CheckpointManager(writer, Report())
    for iteration in range(1, 20):
        writer.fails = iteration % 3 > 0
        saves.save(iteration, iteration)


def test_ranks_end_together_although_one_hears_of_a_failed_save_later():
    """In the background: the outcome of the newest save counts on no rank yet."""
    ended = []
    for quick in (True, False):
        writer = Writer(quick)
        writer.in_background = True
        saves = CheckpointManager(writer, Report())
        saves.writer.save = after_the_previous(writer, writer.save)
        ended.append(save_all(saves, range(1, 20)))
    assert ended[0] == ended[1]
    assert ended[0][0] == [1, 2, 3, 4]


def after_the_previous(writer, save):
    """A background save waits for the one before it, whose result is then known."""
    done = []

    def wait_and_save(iteration, counters):
        done.extend(writer.pending)
        writer.pending = []
        save(iteration, counters)

    def finished(wait=False):
        found = [*done, *(writer.pending if wait or writer.quick else [])]
        writer.pending = [] if wait or writer.quick else writer.pending
        done.clear()
        return found

    writer.finished = finished
    return wait_and_save


def test_a_state_that_is_not_finite_ends_the_run_at_once():
    writer, report = Writer(quick=True, fails=False), Report()
    saves = CheckpointManager(writer, report)
    saves.save(2, 8)
    writer.fails, writer.error = True, NotFiniteError("rank 1: w has 3 of 9 elements")
    with pytest.raises(NotFiniteError, match="after iteration 4: rank 1: w has 3 of 9") as caught:
        saves.save(4, 16)
    assert "the last good checkpoint is somewhere/global_step2" in str(caught.value)


def test_a_published_checkpoint_is_not_called_missing():
    """The ranks could not agree that it is there, but it is."""
    report = Report()
    saves = CheckpointManager(Writer(quick=True, published=True), report)
    saves.save(2, 8)
    assert "WARNING: somewhere/global_step2 is whole, but its save did not end well" in report.said
    assert not any("no checkpoint" in line for line in report.said)
    assert "somewhere/global_step2" in saves.newest_shown


@pytest.mark.parametrize("quick", [False, True])
def test_a_failed_save_is_no_checkpoint_before_a_step(quick):
    writer = Writer(quick, fails=False)
    saves = CheckpointManager(writer, Report())
    assert saves.saved_before(9) is None
    saves.save(2, 8)
    assert saves.saved_before(9) == 2
    writer.fails = True
    saves.save(4, 16)
    assert saves.saved_before(9) == 2
    writer.published = True
    saves.save(6, 24)
    assert saves.saved_before(9) == 6 and saves.saved_before(6) == 2
