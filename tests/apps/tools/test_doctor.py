"""tools/doctor.py: what it looks at, and how it answers where nodes cannot be examined."""

import json
import os
from pathlib import Path

import pytest
import torch
from tool_modules import load_program

from megatron.apps.doctor.examination import Examination
from megatron.apps.doctor.findings import Check, checks_of, judge_reports
from megatron.apps.doctor.probe import report

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    return load_program("tools/doctor.py")


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty current folder and home, no allocation, and no variables of gloo."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("GLOO_SOCKET_IFNAME", "SLURM_JOB_NODELIST", "DS_ENV_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def subject(tool, **values):
    return tool.subject_of(tool.DoctorConfig(**values))


def test_data_in_a_store_is_left_out(tool, capsys):
    found = subject(tool, data_path=("0.3", "s3://bucket/text", "0.7", "text"))
    assert found.data == [os.path.abspath("text.bin"), os.path.abspath("text.idx")]
    assert capsys.readouterr().err == (
        "doctor.py: --data-path s3://bucket/text: not examined, it is not a file of the nodes\n"
    )


def test_a_folder_alone_is_examined(tool, place, capsys):
    assert tool.main([str(place)]) == 0
    assert f"✓ folders: {place} (" in capsys.readouterr().out


def test_files_of_a_folder_and_of_a_pattern(tool, place):
    for name in ("a.jsonl", "b.jsonl", "other"):
        (place / "here" / name).touch()
    here = [os.path.abspath(name) for name in ("a.jsonl", "b.jsonl")]
    assert subject(tool, data_path=(".",)).data == here
    assert subject(tool, data_path=("*.jsonl",)).data == here


def test_the_interface_of_the_processes(tool, place, monkeypatch):
    """DeepSpeed, which starts those of a hostfile, does not pass the variable on."""
    assert subject(tool).interface == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    assert subject(tool, nodes="n1").interface == "eth0"
    assert subject(tool, hostfile="hosts").interface == ""
    for folder, line in (("home", "GLOO_SOCKET_IFNAME=eth1"), ("here", "A=b\n")):
        (place / folder / ".deepspeed_env").write_text(line)
    assert subject(tool, hostfile="hosts").interface == "eth1"
    (place / "here" / ".deepspeed_env").write_text("A=b\n\nGLOO_SOCKET_IFNAME=eth2\n")
    assert subject(tool, hostfile="hosts").interface == "eth2"
    (place / "here" / "own").write_text("GLOO_SOCKET_IFNAME=eth3\n")
    monkeypatch.setenv("DS_ENV_FILE", "own")
    assert subject(tool, hostfile="hosts").interface == "eth3"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--python", "/nope"], "--python /nope: no such program here"),
        (["--nodes", "n1"], "ssh is not installed here"),
        (["--nodes", "n1,n1"], "--nodes n1,n1: give each name once"),
    ],
)
def test_what_ends_with_a_line_and_status_2(tool, place, monkeypatch, capsys, flags, message):
    monkeypatch.setenv("PATH", str(place))
    with pytest.raises(SystemExit) as end:
        tool.main(flags)
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_what_was_examined_is_listed_with_marks(tool, place):
    """From this machine's own report; a finding marks its check."""
    here = report(str(ROOT), ["torch", "no-such-package"], ["no-such-file"], [str(place)])
    reports = {"n1": here}
    done = Examination(checks_of(reports), list(judge_reports(reports, 0.0)))
    lines = tool.as_text(["n1"], done, "tcp").splitlines()
    shown = {line.split(": ")[1]: line.removeprefix("doctor.py: ") for line in lines}
    assert shown["✗ versions"].endswith(f"torch {torch.__version__}, no-such-package missing")
    assert shown["✗ data (--data-path)"].endswith(": 1 files")
    assert shown["✓ folders"].startswith(f"✓ folders: {place} (")
    assert "✓ open files" in shown and "✓ GPUs" in shown
    assert lines[-1] == "doctor.py: 1 node: 2 findings"
    checks = json.loads(tool.as_json(["n1"], done))["checks"]
    assert checks["data (--data-path)"] == "1 files"


def test_what_was_not_to_be_examined_has_no_tick(tool):
    done = Examination([Check("clocks", "", ("clock",))])
    assert tool.as_text(["n1"], done, "tcp").splitlines() == [
        "doctor.py: - clocks: nothing to examine",
        "doctor.py: 1 node: nothing is wrong",
    ]
