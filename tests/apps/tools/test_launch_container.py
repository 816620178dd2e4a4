"""tools/launch_container.py: from its flags to the command that runs."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tool_modules import load_program

ROOT = Path(__file__).parents[3]
TOOL = ROOT / "tools" / "launch_container.py"


@pytest.fixture(scope="module")
def tool():
    return load_program("tools/launch_container.py")


@pytest.fixture
def printed(tool, tmp_path, monkeypatch, capsys):
    """Runs a dry run as user 1000 in an empty folder; returns what it prints, the words of the
    command and the lines for the user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {"PATH": "", "USER": "ada", "NCCL_DEBUG": "INFO"})
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 100)
    monkeypatch.setattr(tool.getpass, "getuser", lambda: "ada")

    def run(*flags):
        tool.main(["--dry-run", "--image", "megatron", *flags])
        found = capsys.readouterr()
        return shlex.split(found.out), found.err.splitlines()

    return run


def test_oneflows_documented_command(printed, tmp_path):
    """python3 tools/launch_container.py --src $PWD --py 3.7 --image NAME:TAG --wheel FILE --cmd"""
    here, wheel = str(tmp_path), tmp_path / "megatron_deepspeed-0.1.0-py3-none-any.whl"
    wheel.touch()
    cmd = "python3 -m oneflow_gpt.training --num-layers 24"
    words, lines = printed(
        *("--runtime", "docker", "--src", here, "--py", "3.7", "--image", "name:tag"),
        *("--wheel", wheel.name, "--cmd", cmd),
    )
    assert words == [
        *"docker run --rm --network host --shm-size 8g --init --ulimit memlock=-1".split(),
        *("--user", "1000:100", "-v", f"{here}:{here}", "-v", f"{wheel}:{wheel}:ro", "-w", here),
        *"-e NCCL_DEBUG -e HOME=/tmp -e USER=ada name:tag bash -c".split(),
        words[-2],
        cmd,
    ]
    assert words[-2].endswith('; exec bash -c "$0"')
    assert f"{wheel} || exit" in words[-2] and f"PYTHONPATH={here}:{here}/compat" in words[-2]
    assert lines == ["launch_container.py: --py 3.7 is not used: the image's own Python runs the "
                     "command"]  # fmt: skip


def test_the_way_of_2023(printed, tmp_path):
    """A checkout at /workspace/megatron, data and checkpoints next to it."""
    (tmp_path / "data").mkdir()
    words, _ = printed(
        *("--runtime", "podman", "--gpus", "all", "--mount", ".:/workspace/megatron"),
        *("--mount", "data:/workspace/dataset:ro", "--workdir", "/workspace/megatron"),
    )
    line = shlex.join(words)
    assert "--device nvidia.com/gpu=all" in line and line.endswith(" megatron bash")
    assert f"-v {tmp_path}:/workspace/megatron -v {tmp_path}/data:/workspace/dataset:ro" in line
    assert "-w /workspace/megatron" in line


def test_variables_and_options(printed):
    words, _ = printed(
        *("--runtime", "docker", "--env", "A=1", "--env", "NCCL_DEBUG=WARN", "B=2"),
        *("--proxy", "host:3128", "--runtime-args=--privileged --name x", "--root"),
    )
    line = shlex.join(words)
    assert "-e A=1 -e NCCL_DEBUG=WARN -e B=2 -e http_proxy=host:3128" in line
    assert "HTTPS_PROXY=host:3128 --privileged --name x megatron bash" in line
    assert "--user" not in line and "-e NCCL_DEBUG " not in line


def test_a_path_that_is_not_mounted_is_noted(printed, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.apps.containers.job.SYSTEM", ())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    cmd = f"ls {tmp_path} {tmp_path}/here"
    assert printed("--runtime", "docker", "--cmd", cmd)[1] == [
        f"launch_container.py: {tmp_path} is on this machine and not mounted; --mount SOURCE "
        "mounts a folder"
    ]
    assert not printed("--runtime", "apptainer", "--cmd", cmd)[1]


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--image=", "give --image; docker build -t megatron . makes one"),
        ("--mount missing", "--mount missing: .*missing does not exist on this machine"),
        ("--src missing", "--src missing: .*missing does not exist on this machine"),
        ("--gpus 0,1", "--gpus 0,1: expected all, none, a number of GPUs"),
        ("--shm-size 8GB", "--shm-size 8GB: expected a size such as 8g"),
        ("--workdir here", "--workdir here: expected an absolute path in the container"),
        ("--env A", "--env A: it is not set here"),
        ("--wheel a.zip", "--wheel a.zip: expected a file that ends in .whl"),
        ("", "--runtime: none of these programs is installed: docker, podman, apptainer"),
    ],
)
def test_errors_name_flag_value_and_remedy(printed, flags, message):
    with pytest.raises(SystemExit, match=f"launch_container.py: error: {message}"):
        printed(*flags.split())


def test_it_runs_without_the_project_installed(tmp_path):
    """With a bare Python, whose exit status is that of the container."""
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@" > words\nexit 5\n')
    docker.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(TOOL), "--image", "megatron", "--cmd", "true"],
        cwd=tmp_path,
        env={"PATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 5, done.stderr
    command = done.stdout.strip()
    assert command == f"docker {(tmp_path / 'words').read_text().strip()}"
    assert command.endswith("megatron bash -c true")
