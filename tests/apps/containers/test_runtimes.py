"""The command line of each program that runs containers."""

import shlex

import pytest

from megatron.apps.containers.job import (
    RUNTIMES,
    ContainerJob,
    ContainerUser,
    Gpus,
    Mount,
    check_image,
    find_runtime,
)
from megatron.config import ConfigError

USER = ContainerUser(1000, 100, "ada")
JOB = ContainerJob(
    image="nvcr.io/nvidia/pytorch:25.04-py3",
    words=("bash", "-c", "nvidia-smi; true"),
    mounts=(Mount("/home/ada/run", "/home/ada/run"), Mount("/data", "/corpus", read_only=True)),
    workdir="/home/ada/run",
    passed=("HF_TOKEN", "NCCL_DEBUG"),
    environment={"A": "1 2"},
    gpus=Gpus(every=True),
    user=USER,
)

COMMANDS = {
    "docker": """docker run --rm --network host --shm-size 8g --init --ulimit memlock=-1 --gpus all
        --user 1000:100 -v /home/ada/run:/home/ada/run -v /data:/corpus:ro -w /home/ada/run
        -e HF_TOKEN -e NCCL_DEBUG -e HOME=/tmp -e USER=ada -e 'A=1 2'
        nvcr.io/nvidia/pytorch:25.04-py3 bash -c 'nvidia-smi; true'""",
    "podman": """podman run --rm --network host --shm-size 8g --security-opt label=disable
        --device nvidia.com/gpu=all --userns keep-id --user 1000:100
        -v /home/ada/run:/home/ada/run -v /data:/corpus:ro -w /home/ada/run
        -e HF_TOKEN -e NCCL_DEBUG -e HOME=/tmp -e USER=ada -e 'A=1 2'
        nvcr.io/nvidia/pytorch:25.04-py3 bash -c 'nvidia-smi; true'""",
    "apptainer": """apptainer exec --nv --bind /home/ada/run:/home/ada/run --bind /data:/corpus:ro
        --pwd /home/ada/run --env PYTHONNOUSERSITE=1 --env 'A=1 2'
        docker://nvcr.io/nvidia/pytorch:25.04-py3 bash -c 'nvidia-smi; true'""",
    "pyxis": """srun --container-image nvcr.io#nvidia/pytorch:25.04-py3
        --container-mounts /home/ada/run:/home/ada/run,/data:/corpus:ro
        --container-workdir /home/ada/run --container-env HF_TOKEN,NCCL_DEBUG
        env PYTHONNOUSERSITE=1 'A=1 2' bash -c 'nvidia-smi; true'""",
}


def command(name, **changes):
    job = ContainerJob(**{**vars(JOB), **changes})
    return RUNTIMES[name].command(RUNTIMES[name].programs[0], job)


@pytest.mark.parametrize("name", RUNTIMES)
def test_command(name):
    assert command(name) == shlex.split(COMMANDS[name])


@pytest.mark.parametrize(
    "name, gpus, words",
    [
        ("docker", Gpus(count=2), "--gpus 2"),
        ("docker", Gpus(devices=("0", "2")), """--gpus '"device=0,2"'"""),
        ("podman", Gpus(count=2), "--device nvidia.com/gpu=0 --device nvidia.com/gpu=1"),
        ("podman", Gpus(devices=("2",)), "--device nvidia.com/gpu=2"),
        ("apptainer", Gpus(devices=("0", "2")), "--env CUDA_VISIBLE_DEVICES=0,2"),
        ("pyxis", Gpus(count=8), "--gpus-per-node 8"),
    ],
)
def test_some_gpus(name, gpus, words):
    assert words in shlex.join(command(name, gpus=gpus))


@pytest.mark.parametrize("name", RUNTIMES)
def test_no_gpus(name):
    line = shlex.join(command(name, gpus=Gpus()))
    assert not any(word in line for word in ("gpu", "--nv", "CUDA"))


@pytest.mark.parametrize(
    "name, terminal, root",
    [
        ("docker", "-i -t", None),
        ("podman", "-i -t", None),
        ("apptainer", None, "--fakeroot"),
        ("pyxis", "--pty", "--container-remap-root"),
    ],
)
def test_terminal_and_root(name, terminal, root):
    with_both = shlex.join(command(name, terminal=True, user=None))
    assert terminal is None or terminal in with_both
    assert terminal is None or terminal not in shlex.join(command(name))
    assert root is None or root in with_both
    assert "--user" not in with_both and "HOME=" not in with_both


@pytest.mark.parametrize("name", RUNTIMES)
def test_own_options_come_before_the_command(name):
    words = command(name, options=("--nodes", "4"))
    assert words.index("--nodes") < words.index("bash")


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_root_of_this_machine_keeps_its_home(name):
    line = shlex.join(command(name, user=ContainerUser(0, 0, "root"), shm_size="1g"))
    assert "--user 0:0" in line and "--shm-size 1g" in line
    assert "HOME=" not in line and "keep-id" not in line


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("apptainer", {"shm_size": "8g"}, "--shm-size 8g: apptainer uses this machine's /dev/shm"),
        ("pyxis", {"network": "none"}, "--network none: pyxis uses this machine's network"),
        ("pyxis", {"gpus": Gpus(devices=("0", "1"))}, "--gpus device=0,1: slurm chooses the GPUs"),
    ],
)
def test_what_a_runtime_cannot_do(name, changes, message):
    with pytest.raises(ConfigError, match=message):
        command(name, **changes)


@pytest.mark.parametrize(
    "image, apptainer, pyxis",
    [
        ("megatron", "docker://megatron", "megatron"),
        ("nvidia/cuda:12", "docker://nvidia/cuda:12", "nvidia/cuda:12"),
        ("host:5000/a/b", "docker://host:5000/a/b", "host:5000#a/b"),
        ("docker://a/b", "docker://a/b", "docker://a/b"),
        ("images/a.sif", "images/a.sif", "images/a.sif"),
        ("/lustre/a.sqsh", "/lustre/a.sqsh", "/lustre/a.sqsh"),
    ],
)
def test_names_of_images(image, apptainer, pyxis):
    assert apptainer in command("apptainer", image=image)
    words = command("pyxis", image=image)
    assert words[words.index("--container-image") + 1] == pyxis


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes programs that print a line on standard error and fail, and are all that is found."""

    def make(*names):
        for name in names:
            (tmp_path / name).write_text("#!/bin/sh\necho no such image >&2\nexit 1\n")
            (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    return make


def test_the_first_installed_runtime_is_used(installed):
    with pytest.raises(
        ConfigError, match="--runtime: none .*: docker, podman, apptainer, singularity, srun"
    ):
        find_runtime(None)
    installed("srun", "singularity")
    assert find_runtime(None) == ("apptainer", "singularity")
    assert find_runtime("pyxis") == ("pyxis", "srun")
    with pytest.raises(
        ConfigError, match="--runtime docker: none of these programs is installed: docker"
    ):
        find_runtime("docker")


def test_images_that_are_known_to_be_missing(installed):
    installed("podman")
    with pytest.raises(ConfigError, match="--image localhost/a:b: no such image; podman build -t"):
        check_image("podman", "podman", "localhost/a:b")
    check_image("podman", "podman", "nvcr.io/nvidia/pytorch:25.04-py3")  # podman fetches it
    with pytest.raises(ConfigError, match="--image a.sif: does not exist; apptainer build a.sif"):
        check_image("apptainer", "apptainer", "a.sif")
