"""What a container runs and sees: mounts, GPUs, variables, the words of a command."""

import os
import signal
import subprocess

import pytest

from megatron.apps.containers.job import (
    Gpus,
    Mount,
    check_wheel,
    combine_mounts,
    command_words,
    parse_environment,
    parse_gpus,
    parse_mount,
    passed_names,
    unmounted_paths,
)
from megatron.config import ConfigError


def test_mounts(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    here = str(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", here)
    assert parse_mount("data") == parse_mount("~/data") == Mount(f"{here}/data", f"{here}/data")
    assert parse_mount(f"{here}:/workspace/megatron/").text == f"{here}:/workspace/megatron"
    assert parse_mount("data:/data:ro").text == f"{here}/data:/data:ro"


@pytest.mark.parametrize(
    "text, message",
    [
        ("missing", "does not exist on this machine; make the folder"),
        (".:data", "data must be an absolute path in the container"),
        (".:/", "/ must be an absolute path in the container, and not / itself"),
        (".:/a:x", r"expected SOURCE\[:TARGET\[:ro\]\]"),
        (".:/a:ro:b", r"expected SOURCE\[:TARGET\[:ro\]\]"),
        (":/a", r"expected SOURCE\[:TARGET\[:ro\]\]"),
        (".:/a,b", "with a comma cannot be mounted"),
    ],
)
def test_a_bad_mount_names_flag_and_value(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--mount .*{message}"):
        parse_mount(text)


def test_equal_mounts_are_one_and_read_only_wins():
    free, guarded, other = Mount("/a", "/a"), Mount("/a", "/a", True), Mount("/b", "/a")
    assert combine_mounts([free, free, guarded]) == combine_mounts([guarded, free]) == (guarded,)
    with pytest.raises(ConfigError, match="--mount /b:/a: /a is mounted at /a already"):
        combine_mounts([free, other])


def test_gpus():
    assert parse_gpus("all") == Gpus(every=True) and parse_gpus("all").wanted
    assert parse_gpus("none") == Gpus() and not Gpus().wanted
    assert parse_gpus("2").chosen == ("0", "1")
    assert parse_gpus("device=1,3").chosen == ("1", "3")
    for text in ("0", "0,1", "device=", "device=1,", "two"):
        with pytest.raises(ConfigError, match=f"--gpus {text}: expected all, none, a number"):
            parse_gpus(text)


def test_variables_of_the_field_are_passed_on():
    here = {
        **dict.fromkeys(["NCCL_DEBUG", "HF_HOME", "ONEFLOW_COMM_NET_IB_ENABLE", "HOME"], "1"),
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_HOME": "/usr/local/cuda",
    }
    names = ("HF_HOME", "NCCL_DEBUG", "ONEFLOW_COMM_NET_IB_ENABLE")
    assert passed_names(here, Gpus(every=True)) == ("CUDA_VISIBLE_DEVICES", *names)
    assert passed_names(here, Gpus(count=1)) == names


def test_variables_by_name_and_value():
    assert parse_environment(["A", "B=x=y", "C="], {"A": "1"}) == (("A",), {"B": "x=y", "C": ""})
    with pytest.raises(ConfigError, match="--env A: it is not set here"):
        parse_environment(["A"], {})
    with pytest.raises(ConfigError, match="--env 1=2: expected NAME or NAME=VALUE"):
        parse_environment(["1=2"], {})


def test_wheels(tmp_path):
    path = tmp_path / "megatron_deepspeed-0.1.0-py3-none-any.whl"
    with pytest.raises(ConfigError, match="--wheel .*does not exist; python3 -m pip wheel"):
        check_wheel(path)
    path.touch()
    assert check_wheel(path) == path
    with pytest.raises(ConfigError, match="--wheel .*a file that ends in .whl"):
        check_wheel(tmp_path)
    with pytest.raises(ConfigError, match="OneFlow itself is not used here; leave the flag out"):
        check_wheel(tmp_path / "oneflow-0.3.5+cu112-cp37-cp37m-linux_x86_64.whl")


def run(words, **variables):
    environment = {"PATH": os.environ["PATH"]} | variables
    return subprocess.run(words, env=environment, capture_output=True, text=True)


def test_a_command_sees_the_source_first(tmp_path):
    """Run by the shell of this machine, as a container's would."""
    source = tmp_path / "a checkout"
    done = run(command_words('echo "$PYTHONPATH"; exit 3', source, None), PYTHONPATH="/image")
    assert done.stdout == f"{source}:{source}/compat:/image\n"
    assert done.returncode == 3


def test_signals_reach_the_command(tmp_path):
    """It is the process that was started, not a child of its shell."""
    words = command_words("echo $$; kill -TERM $$", tmp_path, None)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.communicate()[0] == f"{process.pid}\n"
    assert process.returncode == -signal.SIGTERM


def test_a_wheel_is_installed_first(tmp_path):
    """A stand-in for python3 notes how pip is called."""
    (tmp_path / "python3").write_text('#!/bin/sh\necho pip: "$@"\nexit $PIP\n')
    (tmp_path / "python3").chmod(0o755)
    words = command_words("echo $PYTHONPATH", None, tmp_path / "a b.whl")
    path = f"{tmp_path}:{os.environ['PATH']}"
    pip, modules = run(words, PATH=path, PIP="0").stdout.splitlines()
    assert pip.startswith("pip: -m pip install")
    assert pip.endswith(f"--target {modules} {tmp_path}/a b.whl")
    failed = run(words, PATH=path, PIP="7")
    assert failed.returncode == 7 and len(failed.stdout.splitlines()) == 1


def test_without_a_command_there_is_a_shell():
    assert command_words(None, None, None) == ("bash",)
    assert command_words("true", None, None) == ("bash", "-c", "true")


def test_paths_that_the_container_does_not_see(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.apps.containers.job.SYSTEM", ("/usr",))
    data = str(tmp_path / "data" / "corpus_text_document")
    os.mkdir(tmp_path / "data")
    cmd = f"python3 a.py --save={tmp_path} --data-path {data} /usr/bin/env /nowhere/x/y relative"
    assert unmounted_paths(cmd, ()) == [str(tmp_path), data]
    assert unmounted_paths(cmd, (Mount("/x", str(tmp_path)),)) == []
    assert unmounted_paths("an 'open quote", ()) == []
