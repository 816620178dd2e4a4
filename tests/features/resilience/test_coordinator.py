"""What the coordinator of the guardians decides, without processes."""

import pytest

from megatron.features.resilience.restart.coordinator import (
    JUDGING_SECONDS,
    MOST_ALIKE,
    REPLACE_SECONDS,
    STOP_SECONDS,
    Coordinator,
    Rules,
)
from megatron.features.resilience.restart.peers import hello


class Wire:
    """The connection of a guardian, which keeps what is sent."""

    def __init__(self, address="127.0.0.1"):
        self.address, self.sent, self.closed = address, [], False

    def send(self, message):
        if self.closed:
            raise BrokenPipeError
        self.sent.append(message)

    def close(self):
        self.closed = True


def greeting(rank, size, host="host", port=1000, **flags):
    own = hello(rank, size, port, 70 + rank, {f"--{name}": value for name, value in flags.items()})
    return own | {"host": host}


class Run:
    """A coordinator with guardians whose trainers do what a test says."""

    def __init__(self, size, hosts=None, **rules):
        self.size, self.port = size, 1000
        own = greeting(0, size, hosts[0] if hosts else "host")
        self.coordinator = Coordinator(own, "first", Rules(**rules))
        self.members = {}
        for rank in range(size):
            self.join(rank, hosts[rank] if hosts else "host")

    def join(self, rank, host="host"):
        self.port += 1
        address = "127.0.0.1" if host == "host" else host
        own = greeting(rank, self.size, host, self.port)
        self.members[rank] = self.coordinator.joined(Wire(address), own)
        self.coordinator.tick(0.1)

    def say(self, rank, kind, **facts):
        message = {"kind": kind, "generation": self.coordinator.generation, "port": 5, **facts}
        self.coordinator.received(self.members[rank], message)

    def end(self, rank, status, **facts):
        self.say(rank, "ended", status=status, **facts)
        self.coordinator.tick(0.1)

    def stopped(self):
        """All guardians do what they are told."""
        self.coordinator.tick(JUDGING_SECONDS)
        for rank, member in self.members.items():
            if self.coordinator.state == "stopping" and member.running:
                assert member.peer.sent[-1]["kind"] == "stop"
                self.say(rank, "ended", status=-9, killed=True)
        self.coordinator.tick(0.1)

    def last(self, rank):
        return self.members[rank].peer.sent[-1]

    def ranks(self):
        """The rank that each running trainer was given."""
        return {
            rank: self.last(rank)["rank"] for rank, each in self.members.items() if each.running
        }

    def finished(self):
        found = {self.last(rank).get("status") for rank in self.members if self.members[rank]}
        return found.pop() if len(found) == 1 else None


def test_all_start_when_the_last_has_come_and_end_together():
    run = Run(3)
    assert run.ranks() == {0: 0, 1: 1, 2: 2}
    assert {run.last(rank)["port"] for rank in range(3)} == {1001}
    assert run.last(2)["address"] == "first" and run.last(2)["failure"] is None
    run.end(0, 0)
    run.end(2, 0)
    assert run.finished() is None
    run.end(1, 0)
    assert run.finished() == 0


def test_a_killed_rank_is_named_and_all_start_again(caplog):
    run = Run(2)
    run.say(1, "learnt", iteration=17)
    run.end(0, 1, trainer=400)  # gloo's error on the other rank is heard of first
    run.say(1, "ended", status=-9, trainer=401)
    run.stopped()
    assert "rank 1 (host, process 401) was killed by SIGKILL" in caplog.text
    assert "rank 0" not in caplog.text
    assert run.ranks() == {0: 0, 1: 1}
    assert run.last(0)["generation"] == 1 and run.last(0)["iteration"] == 17


def test_nobody_starts_before_all_have_ended():
    run = Run(2)
    run.say(1, "ended", status=-11)
    run.coordinator.tick(1)
    assert run.last(0)["kind"] == "stop"
    run.coordinator.tick(STOP_SECONDS / 2)
    assert run.coordinator.generation == 0
    run.end(0, -9, killed=True)
    assert run.coordinator.generation == 1


def test_what_comes_too_late_is_not_heard():
    run = Run(2)
    run.end(1, -9)
    run.stopped()
    run.coordinator.received(run.members[0], {"kind": "ended", "generation": 0, "status": 1})
    run.coordinator.tick(1)
    assert run.ranks() == {0: 0, 1: 1} and run.last(0)["generation"] == 1


def test_a_mistake_of_the_user_ends_the_run():
    run = Run(2)
    run.end(0, 2)
    run.end(1, 2)
    run.coordinator.tick(JUDGING_SECONDS)
    assert run.finished() == 2


def test_an_error_that_another_rank_caused_is_no_mistake_of_the_user(caplog):
    run = Run(2)
    run.end(0, 2)
    run.end(1, -9)
    run.stopped()
    assert run.coordinator.generation == 1 and "rank 1" in caplog.text


@pytest.mark.parametrize(("status", "kind"), [(1, "error"), (3, "error"), (-9, "signal")])
def test_the_same_failure_at_the_same_step_ends_the_run(status, kind, caplog):
    run = Run(2)
    for _ in range(MOST_ALIKE[kind] - 1):
        run.say(0, "learnt", iteration=5)
        run.end(1, status)
        run.stopped()
        assert len(run.ranks()) == 2
    run.say(0, "learnt", iteration=5)
    run.end(1, status)
    run.coordinator.tick(JUDGING_SECONDS)
    assert run.finished() == 3 and f"{MOST_ALIKE[kind]} times at iteration 5" in caplog.text


def test_failures_with_progress_between_them_never_end_the_run():
    run = Run(2)
    for step in range(100):
        run.say(0, "saved", iteration=step, saves=1)
        run.end(1, 1)
        run.stopped()
    assert run.coordinator.generation == 100


def test_the_limit_of_restarts():
    run = Run(2, restarts=1)
    run.end(1, -9)
    run.stopped()
    assert run.coordinator.generation == 1
    run.end(1, -9)
    run.stopped()
    assert run.finished() == 3


def test_a_signal_to_stop_ends_the_run_instead():
    run = Run(2)
    run.say(0, "stopping", signal=15)
    run.end(1, -15)
    run.coordinator.tick(JUDGING_SECONDS)
    assert run.finished() == 143
    run = Run(2)
    run.say(0, "stopping", signal=15)
    run.end(1, 0)  # which have saved
    run.end(0, 0)
    assert run.finished() == 0


LEARNT = {"replica": 1, "micro_batch": 2, "global_batch": 8}


def test_without_the_flag_a_lost_guardian_ends_the_run(caplog):
    run = Run(4)
    run.coordinator.left(run.members.pop(3), "has ended")
    run.stopped()
    assert run.finished() == 3 and "--inprocess-min-world-size" in caplog.text


def test_fewer_ranks_continue_with_the_same_batch_until_others_are_back():
    run = Run(4, least=1)
    run.say(0, "learnt", **LEARNT)
    run.coordinator.left(run.members.pop(1), "has ended")
    run.stopped()
    # Three do not divide the batch: two train, and one waits.
    assert run.ranks() == {0: 0, 2: 1}
    assert run.last(0)["size"] == 2 and run.last(0)["batch"] == 8
    run.join(1)
    assert run.ranks() == {0: 0, 2: 1}
    run.say(0, "saved", iteration=30, saves=1, **LEARNT)
    run.stopped()
    assert run.ranks() == {0: 0, 1: 1, 2: 2, 3: 3}


def test_a_replica_of_the_model_is_never_split():
    run = Run(4, hosts=["a", "a", "b", "b"], least=2)
    run.say(0, "learnt", replica=2, micro_batch=1, global_batch=8)
    run.coordinator.left(run.members.pop(0), "has ended")
    run.stopped()
    assert run.ranks() == {2: 0, 3: 1}  # two ranks of one host
    assert run.last(2)["address"] == "b"
    run.coordinator.left(run.members.pop(3), "has ended")
    run.stopped()
    assert run.ranks() == {1: 0, 2: 1}
    run.coordinator.left(run.members.pop(1), "has ended")
    run.stopped()
    assert run.last(2)["status"] == 3


def test_a_rank_that_fails_alone_again_and_again_gets_no_more_work(caplog):
    run = Run(4, least=2)
    run.say(0, "learnt", **LEARNT)
    for _ in range(MOST_ALIKE["error"]):
        run.end(2, 1)
        run.stopped()
    assert run.ranks() == {0: 0, 1: 1}
    assert "rank 2 (host, process 72) gets no more work" in caplog.text


def test_a_guardian_that_does_not_end_its_trainer_is_lost():
    run = Run(4, least=1)
    run.say(0, "learnt", **LEARNT)
    run.end(1, -9)
    for rank in (0, 2):
        run.say(rank, "ended", status=-9, killed=True)
    run.coordinator.tick(STOP_SECONDS + 1)
    assert run.members[3].peer.closed
    assert run.ranks() == {0: 0, 1: 1}


def test_a_suspended_job_has_not_waited(caplog):
    coordinator = Coordinator(greeting(0, 2), "first", Rules(patience=60))
    coordinator.tick(59)
    assert coordinator.state == "gathering"
    coordinator.tick(2)
    assert "waited 1 minutes" in caplog.text and "ranks 0, 1" in caplog.text


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (greeting(0, 2), "two processes have RANK=0; give each its own"),
        (greeting(1, 3), "WORLD_SIZE is 3 on rank 1 and 2 on rank 0"),
    ],
)
def test_a_mistake_of_one_process_ends_a_run_that_has_not_begun(other, message, caplog):
    coordinator = Coordinator(greeting(0, 2), "first", Rules())
    first, wire = Wire(), Wire()
    coordinator.joined(first, greeting(0, 2))
    assert coordinator.joined(wire, other) is None
    assert first.sent == wire.sent == [{"kind": "finish", "status": 2}]
    assert message in caplog.text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("begun", [False, True])
def test_a_process_of_another_run_is_refused(size, begun, caplog):
    """It has another folder: in --save, or in the current one where that is relative."""
    own, far = greeting(0, 2, save="a"), {"folder": "elsewhere"}
    coordinator, wires = Coordinator(own, "first", Rules()), [Wire(), Wire()]
    for rank in range(2 if begun else 1):
        coordinator.joined(wires[rank], greeting(rank, 2, save="a"))
    coordinator.tick(0.1)
    for other in (greeting(1, size, save="b"), greeting(1, size, save="a") | far):
        stray = Wire()
        assert coordinator.joined(stray, other) is None
        [message] = stray.sent
        assert message["status"] == 2 and "--save" in message["why"]
    coordinator.tick(REPLACE_SECONDS + 1)
    if not begun:
        # A node may have another path of the same folder.
        coordinator.joined(wires[1], greeting(1, 2, "node", save="a") | far)
        coordinator.tick(0.1)
    assert coordinator.state == "running" and coordinator.generation == 0
    assert [[each["kind"] for each in wire.sent] for wire in wires] == [["start"], ["start"]]
    assert caplog.text.count("is refused") == 2 and "error:" not in caplog.text


def test_another_size_is_refused_once_the_run_has_begun(caplog):
    run, stray = Run(2, least=1), Wire()
    assert run.coordinator.joined(stray, greeting(1, 3)) is None
    assert stray.sent[0]["why"] == "WORLD_SIZE is 2 there and 3 here"
    assert run.ranks() == {0: 0, 1: 1} and "error:" not in caplog.text


def test_a_guardian_that_lives_is_not_replaced():
    run, stray = Run(2, least=1), Wire()
    waiting = run.coordinator.joined(stray, greeting(1, 2))
    run.coordinator.tick(REPLACE_SECONDS - 1)
    assert not stray.sent and not stray.closed
    run.coordinator.tick(2)
    assert stray.sent[0]["why"] == "its rank 1 (host, process 71) is alive" and stray.closed
    run.coordinator.left(waiting, "has ended")
    assert run.ranks() == {0: 0, 1: 1} and run.coordinator.state == "running"


def test_a_guardian_replaces_a_dead_one():
    run, again = Run(2, least=1), Wire()
    run.say(0, "learnt", **LEARNT)
    waiting = run.coordinator.joined(again, greeting(1, 2))
    run.coordinator.left(run.members[1], "does not answer")
    run.members[1] = waiting
    run.stopped()
    assert run.ranks() == {0: 0, 1: 1} and run.last(1)["generation"] == 1


def test_a_guardian_that_waits_can_be_stopped_and_ends_with_the_run():
    run, one, other = Run(2), Wire(), Wire()
    stopped = run.coordinator.joined(one, greeting(1, 2))
    run.coordinator.joined(other, greeting(0, 2))
    run.coordinator.received(stopped, {"kind": "stopping", "generation": -1, "signal": 15})
    assert one.sent == [{"kind": "finish", "status": 143}]
    assert run.coordinator.stopped_by is None
    run.end(0, 0)
    run.end(1, 0)
    assert other.sent == [{"kind": "finish", "status": 0}]
