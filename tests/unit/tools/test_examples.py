"""examples_deepspeed/: every script prints, in a dry run, a command that the trainer takes."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.config import FLAG_CLASSES, FlagParser, resolve
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_json import read_json

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples_deepspeed"
APART = ("common.sh", "pretrain_shakespeare_char.sh")
"""What the others source, and what makes its own data; tests/e2e has the latter."""

SCRIPTS = sorted(path for path in FOLDER.glob("*.sh") if path.name not in APART)
SETTINGS = {
    "DRY_RUN": "1",
    "DATA_PATH": "0.3 data/a 0.7 data/b",
    "VOCAB_FILE": "my vocab.json",
    "MERGE_FILE": "merges.txt",
}
GIVEN = {
    "resume.sh": "runs/x --deepspeed_config deepspeed_configs/ds_zero3.json --num-layers 2 "
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 "
    "--train-iters 10 --lr 1e-4".split()
}
"""What a script has to be given; resume.sh would take the model from the checkpoint."""


def script(path, *flags, **settings):
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    return subprocess.run(
        ["bash", str(path), *flags],
        env=kept | SETTINGS | settings,
        capture_output=True,
        text=True,
        check=False,
    )


def printed(path, *flags, **settings):
    result = script(path, *flags, **settings)
    assert result.returncode == 0, result.stderr
    words = shlex.split(result.stdout)
    cut = words.index("pretrain_gpt.py")
    return words[:cut], words[cut + 1 :]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_command_resolves(path):
    """Flags, JSON and layout go together on one node of 8 processes."""
    launcher, flags = printed(path, *GIVEN.get(path.name, ()))
    assert launcher == ["deepspeed"]
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    file = ROOT / settings["deepspeed_config"].value
    settings = deepspeed_json.merge(settings, read_json(str(file)), str(file), 8)
    config = resolve(settings, world_size=8).config
    assert config.data.data_path == ("0.3", "data/a", "0.7", "data/b")
    assert config.checkpoint.save == config.checkpoint.load
    assert config.checkpoint.save.startswith("runs/")
    if path.name != "resume.sh":
        assert config.tokenizer.vocab_file == "my vocab.json"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_flag_behind_the_script_replaces_its_own(path):
    own = ("--save-interval", "7", "--lr=1e-3", "--data-path", "other")
    _, flags = printed(path, *GIVEN.get(path.name, ()), *own)
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    assert settings["save_interval"].value == 7
    assert settings["lr"].value == 1e-3
    assert settings["data_path"].value == ("other",)


def test_launchers():
    path = FOLDER / "pretrain_llama_1b.sh"
    assert printed(path, LAUNCHER="python")[0] == ["python"]
    hosts = printed(path, HOSTFILE="hosts", GPUS="4")[0]
    assert hosts == ["deepspeed", "--hostfile", "hosts", "--num_gpus", "4"]
    rank = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "n0", "MASTER_PORT": "1", "GPUS": "8"}
    assert printed(path, LAUNCHER="torchrun", **rank)[0] == shlex.split(
        "torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr n0 --master-port 1"
    )


def test_tokenizer_folder():
    _, flags = printed(FOLDER / "pretrain_llama_1b.sh", TOKENIZER="tokenizers/a b")
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    assert settings["tokenizer_type"].value == "HFTokenizer"
    assert settings["tokenizer_model"].value == "tokenizers/a b"
    assert "vocab_file" not in settings


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"DATA_PATH": ""}, "set DATA_PATH"),
        ({"VOCAB_FILE": ""}, "set TOKENIZER, or VOCAB_FILE and MERGE_FILE"),
        ({"LAUNCHER": "mpirun"}, "LAUNCHER mpirun: deepspeed, torchrun or python"),
    ],
)
def test_missing_settings(settings, message):
    result = script(FOLDER / "pretrain_gpt2_125m.sh", **settings)
    assert result.returncode == 2
    assert result.stderr.startswith("pretrain_gpt2_125m.sh: error: ") and message in result.stderr


def test_resume_without_a_folder():
    result = script(FOLDER / "resume.sh")
    assert result.returncode == 2 and "folder of checkpoints is missing" in result.stderr


def test_slurm_starts_a_torchrun_on_each_node(tmp_path):
    """With srun and scontrol that stand for slurm's on the second of two nodes."""
    for name, text in {
        "srun": 'shift; SLURM_NODEID=1 exec "$@"',
        "scontrol": "printf 'node-7\\nnode-8\\n'",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        **{"SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node-[7-8]"},
        **{"SLURM_JOB_ID": "123", "SLURM_JOB_END_TIME": "4102444800"},
    }
    path = FOLDER / "slurm" / "pretrain.sbatch"
    launcher, flags = printed(path, "pretrain_llama_1b.sh", "--lr", "1e-3", **slurm)
    assert " ".join(launcher).startswith("torchrun --nproc-per-node 8 --nnodes 2 --node-rank 1")
    assert launcher[-4:] == ["--master-addr", "node-7", "--master-port", "20123"]
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    assert settings["lr"].value == 1e-3
    assert settings["exit_duration_in_mins"].value > 1000


def test_readme_names_every_script():
    text = (FOLDER / "README.md").read_text()
    assert {path.name for path in SCRIPTS} <= set(re.findall(r"\w+\.sh", text))
