"""Flags of unattended runs: what is refused, and what is said."""

import pytest

from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve
from megatron.features.resilience.watch.watchdog import hang_limits
from megatron.run.run import start_processes

MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3"
)


def settings_of(flags):
    return FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {flags}".split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--on-spike rollback", "--on-spike rollback returns to a checkpoint in --save"),
        ("--on-spike stop --spike-sigma 0", "--spike-sigma 0.0 turns the rule for spikes off"),
        ("--spike-rollbacks 3", "--spike-rollbacks 3 has an effect with --on-spike rollback"),
        ("--spike-window 3", "--spike-window 3 must be at least 20"),
        ("--straggler-factor 0.5", "--straggler-factor 0.5 must be 0 or more than 1"),
        ("--hang-seconds inf", "--hang-seconds inf must be 0 or at least one second"),
        ("--hang-seconds 0.3", "--hang-seconds 0.3 must be 0 or at least one second"),
        ("--hang-seconds nan", "--hang-seconds nan must be 0 or at least one second"),
        ("--inprocess-max-iterations 2", "has an effect with --inprocess-restart only"),
        ("--inprocess-min-world-size 2", "has an effect with --inprocess-restart only"),
        ("--non-persistent-save-interval 10", "--non-persistent-save-interval 10 saves between"),
        ("--replication-factor 3", "has an effect with --non-persistent-save-interval only"),
    ],
)
def test_refused(flags, message):
    """One line that names the flag, its value and what it needs."""
    with pytest.raises(ConfigError) as refusal:
        resolve(settings_of(flags), 1)
    assert message in str(refusal.value)


def test_more_ranks_than_the_run_has(monkeypatch):
    """It is found before anything is forked."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = "--inprocess-restart --inprocess-min-world-size 3"
    with pytest.raises(ConfigError, match="size 3 is more than the 2 processes"):
        start_processes(settings_of(flags), [])


@pytest.mark.parametrize(("processes", "said"), [(2, True), (1, False)])
def test_longer_than_a_collective(processes, said):
    """Of several processes a collective ends before the limit."""
    resolved = resolve(settings_of("--hang-seconds 900 --global-batch-size 4"), processes)
    found = [note for note in resolved.notes if "--hang-seconds 900.0" in note]
    assert bool(found) == said
    assert all("--distributed-timeout-minutes 10.0" in note for note in found)


def test_the_limit_of_a_phase_that_is_longer_than_a_collective():
    flags = "--hang-limits save=1200 data=20 --global-batch-size 4"
    (note,) = (note for note in resolve(settings_of(flags), 2).notes if "--hang-" in note)
    assert note.startswith("--hang-limits save=1200 is longer than --distributed-timeout-minutes")


@pytest.mark.parametrize("item", ["foo=1", "save", "save=", "save=-5", "save=nan", "save=inf"])
def test_wrong_hang_limits(item):
    """The message has the item and what would be right."""
    config = resolve(settings_of(f"--hang-limits {item}"), 1).config
    with pytest.raises(ConfigError, match=f"--hang-limits {item}: "):
        hang_limits(config)


def test_hang_limits_are_whole_seconds():
    """A part of a second is one, not 0, which would be no limit."""
    limits = hang_limits(resolve(settings_of("--hang-limits save=0.3 data=0"), 1).config)
    assert (limits["save"], limits["data"]) == (1, 0)
