"""The documented commands run: a sample by ``make test``, all of them by ``make proof``.

``make test`` runs the cases with ``sample: true`` in warm processes, and resolves every training
command at its full size.
"""

import re
import socket
from dataclasses import replace

import pytest
from documented import all_cases, cases, training_flags
from running import Runner, check, numbers, training_script

from megatron.config import FLAG_CLASSES, FlagParser, resolve
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json
from megatron.families import family_of

ALL = list(all_cases())
*MISTAKES, PORT_IN_USE = cases("mistakes")


def named(found):
    return [pytest.param(case, id=case.id) for case in found]


def expect(case, runner):
    """Runs a case and, where it has one, the command that it must equal."""
    done = runner.run(case)
    check(case, done)
    if case.today is None:
        return
    today = runner.run_today(case)
    assert today.status == 0, f"{case.id}: today's spelling\n$ {today.command}\n{today.output}"
    rows, weights = numbers(done)
    rows_today, weights_today = numbers(today)
    assert weights, f"{case.id}: there are no weights to compare"
    assert rows == rows_today, f"{case.id}\n$ {done.command}\n$ {today.command}"
    assert weights == weights_today, f"{case.id}\n$ {done.command}\n$ {today.command}"


@pytest.mark.realdata
@pytest.mark.parametrize("case", named(case for case in ALL if case.sample))
def test_sample(case, quick_runner):
    expect(case, quick_runner)


@pytest.mark.proof
@pytest.mark.realdata
@pytest.mark.parametrize("case", named(ALL))
def test_command(case, runner):
    expect(case, runner)


def trains(case):
    """Whether a case is a training command, or a script that prints one, with the model's sizes."""
    if "--use-checkpoint-args" in case.run or "tools/retro/" in case.run:  # a project's sizes
        return False
    return training_script(case.run) if case.is_script else training_flags(case.run) is not None


@pytest.mark.parametrize("case", named(case for case in ALL if trains(case) and not case.status))
def test_full_size(case, tmp_path):
    """The documented sizes and number of processes resolve to a configuration."""
    text = case.run
    if case.is_script:
        runner = Runner(tmp_path, tmp_path)
        text = runner.printed(case, runner.dry_folder(case))
    settings = FlagParser(*FLAG_CLASSES).settings(training_flags(text))
    trained = re.search(r"pretrain_(bert|t5)\.py", text)
    settings = family_of(trained[1] if trained else "gpt").complete_settings(settings)
    path = settings["deepspeed_config"].value if "deepspeed_config" in settings else ""
    content = read_json(path) if path else {}
    processes = case.processes or 1
    resolved = resolve(deepspeed_json.merge(settings, content, path, processes), processes)
    assert resolved.config.parallel.world_size == processes


@pytest.mark.realdata
@pytest.mark.parametrize("case", named(case for case in MISTAKES if case.sample))
def test_mistake_sample(case, quick_runner):
    check(case, quick_runner.run(case))


@pytest.mark.proof
@pytest.mark.realdata
@pytest.mark.parametrize("case", named(MISTAKES))
def test_mistake(case, runner):
    check(case, runner.run(case))


@pytest.mark.realdata
def test_a_port_in_use(quick_runner):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = {"MASTER_PORT": str(listening.getsockname()[1])}
        case = replace(PORT_IN_USE, environment=PORT_IN_USE.environment | port)
        check(case, quick_runner.run(case))
