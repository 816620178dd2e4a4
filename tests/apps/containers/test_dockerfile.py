"""The Dockerfile fits the project: its sources exist, and the image gets what setup.py installs."""

import fnmatch
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setup_arguments import setup_arguments

ROOT = Path(__file__).parents[3]


def instructions():
    """The instructions of the Dockerfile, each as its name and the rest of it."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [
        (name, rest.strip()) for name, _, rest in (line.partition(" ") for line in lines) if name
    ]


def argument(name):
    (value,) = (rest.split("=", 1)[1] for word, rest in instructions()
                if word == "ARG" and rest.startswith(f"{name}="))  # fmt: skip
    return value.strip('"')


def sent(path):
    """Whether .dockerignore sends a path to the build; its last line that fits a part decides."""
    result, parts = True, [str(p) for p in (Path(path), *Path(path).parents)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#"):
            hit = any(
                fnmatch.fnmatch(part, pattern.removeprefix("**/"))
                or (pattern.startswith("**/") and fnmatch.fnmatch(Path(part).name, pattern[3:]))
                for part in parts
            )
            result = line.startswith("!") if hit else result
    return result


def test_it_is_a_dockerfile():
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "CMD"}
    names = [name for name, _ in instructions()]
    assert set(names) <= known and names[:2] == ["ARG", "FROM"] and names.count("FROM") == 1
    for name, rest in instructions():
        if name == "RUN":
            script = re.sub(r"--mount=\S+ *", "", rest)
            done = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_what_it_copies_exists_and_is_sent():
    copied = [rest.split()[:-1] for name, rest in instructions() if name == "COPY"]
    assert ["."] in copied
    for source in sum(copied, []):
        assert (ROOT / source).exists() and (source == "." or sent(source)), source


def test_data_and_environments_are_not_sent():
    for path in ("data/corpus.bin", ".venv/bin/python", ".git", "checkpoints", "runs/a"):
        assert not sent(path), path
    assert not sent("megatron/util/__pycache__/files.cpython-311.pyc")
    assert sent("megatron/util/files.py")


def test_everything_that_is_installed_is_sent():
    given = setup_arguments()
    folders = given["package_dir"]
    for package in given["packages"]:
        top = package.split(".")[0]
        assert sent(folders.get(package, package.replace(".", "/"))), package
        assert top not in folders or sent(folders[top])
    for module in given["py_modules"]:
        assert sent(f"{module}.py"), module


def test_torch_is_the_one_of_make_install():
    (makefile,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert argument("TORCH") == makefile
    (needed,) = (
        requirement
        for requirement in setup_arguments()["install_requires"]
        if requirement.startswith("torch")
    )
    (low,), (high,) = re.findall(r">=2\.(\d+)", needed), re.findall(r"<2\.(\d+)", needed)
    (check,) = (rest for name, rest in instructions() if name == "RUN" and "import torch" in rest)
    assert f"not (2, {low}) <= tuple(map(int, v)) < (2, {high})" in check


BASE = os.environ.get("MEGATRON_TEST_IMAGE_BASE")
BUILDER = next(filter(shutil.which, ("podman", "docker")), None)
TRAIN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --train-iters 2 --micro-batch-size 1 --global-batch-size 4 "
    "--lr 1e-3 --log-interval 1 --eval-iters 1 --num-workers 0 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 100"
)


@pytest.mark.proof
@pytest.mark.skipif(BASE is None, reason="MEGATRON_TEST_IMAGE_BASE names no image to build on")
@pytest.mark.skipif(BUILDER is None, reason="neither podman nor docker is installed")
def test_an_image_is_built_and_trains(tmp_path):
    """MEGATRON_TEST_IMAGE_ARGS are further words for the build, such as mirrors of packages."""
    image = "localhost/megatron-test:latest"
    more = shlex.split(os.environ.get("MEGATRON_TEST_IMAGE_ARGS", ""))
    build = [BUILDER, "build", "--network", "host", "--build-arg", f"BASE={BASE}", *more]
    done = subprocess.run([*build, "-t", image, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]

    tool = [sys.executable, str(ROOT / "tools" / "launch_container.py"), "--runtime", BUILDER]
    train = f"python3 /workspace/megatron/pretrain_gpt.py {TRAIN} --save checkpoints"
    done = subprocess.run(
        [*tool, "--image", image, "--cmd", train],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "iteration        2/       2" in done.stdout
    saved = tmp_path / "checkpoints" / "latest"
    assert saved.read_text().strip() == "global_step2"
    assert saved.stat().st_uid == os.getuid()
