"""The folder of a start: whole, numbered, without secrets."""

import dataclasses
import json
import os
import stat
import types

import pytest

from megatron.config import RunConfig
from megatron.data.build import DataFile
from megatron.features.run_record.callback import RunRecorder, StartRecord
from megatron.features.run_record.source_tree import SourceTree
from megatron.features.run_record.surroundings import RankPlace, by_host, launched_command, rank_map
from megatron.run.run import parse_run
from megatron.training.resume import ResumePoint

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --lr 1e-3 "
    "--micro-batch-size 1 --global-batch-size 4 --tokenizer-type NullTokenizer --vocab-size 9 "
    "--mock-data --train-iters 3 --tracker-project secret-in-a-flag"
).split()
FILES = [DataFile("train", "/data/a", 0.5, (0.0, 0.9), {"tokens": 7, "digest": "ab"})]
PLACES = [
    RankPlace("one", "H100", 0, 64, 10),
    RankPlace("one", "H100", 1, 64, 10),
    RankPlace("two", "H200", 0, 32, 20),
]
ENVIRONMENT = {
    "HF_TOKEN": "secret-in-a-flag", "NCCL_DEBUG": "INFO", "RANK": "0", "MY_DIARY": "private",
    "WANDB_BASE_URL": "https://host", "MEGATRON_API_KEY": "secret-key", "HOME": "/private",
    "MEGATRON_MIRROR": "https://me:word@host", "SLURM_JOB_ID": "7", "SLURM_JOB_ACCOUNT": "private",
}  # fmt: skip


@pytest.fixture(scope="module")
def run():
    return parse_run(None, FLAGS, "gpt")


def start(run, save, begin=ResumePoint()):  # noqa: B008
    return StartRecord(save, run, begin, FILES, PLACES, ENVIRONMENT)


def test_what_is_in_the_folder(run, tmp_path):
    record = start(run, tmp_path)
    assert record.folder == tmp_path / "run" / "001"
    found = json.loads((record.folder / "record.json").read_text())
    assert found["environment"] == {
        "MEGATRON_MIRROR": "https://***@host", "NCCL_DEBUG": "INFO", "RANK": "0",
        "SLURM_JOB_ID": "7",
    }  # fmt: skip
    assert found["data"][0] == {
        "part": "train", "path": "/data/a", "weight": 0.5, "share": [0.0, 0.9],
        "content": {"tokens": 7, "digest": "ab"},
    }  # fmt: skip
    assert found["given"]["lr"] == "flag --lr"
    assert found["versions"].keys() >= {"megatron", "python", "torch", "deepspeed"}
    assert (found["world_size"], found["ended"], found["iteration"]) == (3, None, 0)
    assert [host["ranks"] for host in found["hosts"]] == [[0, 1], [2]]
    config = json.loads((record.folder / "config.json").read_text())
    assert RunConfig.from_dict(config).training == run.config.training
    assert config["logging"]["tracker_project"] == "***"
    assert json.loads((record.folder / "deepspeed.json").read_text()) == run.content
    assert any(line.startswith("torch==") for line in lines(record, "requirements.txt"))
    script = record.folder / "command.sh"
    assert stat.S_IMODE(os.stat(script).st_mode) & stat.S_IXUSR
    text = script.read_text()
    assert "export NCCL_DEBUG=INFO\n" in text and "RANK" not in text and "SLURM" not in text
    assert "; the command of one of 3 processes\n" in text
    assert found["command"][-len(FLAGS) :] == [*FLAGS[:-1], "***"] and found["launcher"] is None
    for file in record.folder.iterdir():
        content = file.read_text(errors="replace")
        assert "secret-in-a-flag" not in content or file.name == "changes.patch", file
        assert "private" not in content.replace("private_", "") or file.suffix != ".json", file


def test_the_command_of_all_processes():
    own = ["python", "train.py", "--local_rank=1", "--lr", "1"]
    launcher = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert launched_command(own, 1, 2) == [*launcher, "train.py", "--lr", "1"]
    assert launched_command([*own, "--num-gpus-per-node=2"], 1, 2) is None
    assert launched_command(own, 1, 1) is launched_command(own, 2, 16) is None


def lines(record, name):
    return (record.folder / name).read_text().splitlines()


def test_the_patch_has_no_values_of_secret_names(run, tmp_path, monkeypatch):
    patch = b"diff --git a/a.ini b/a.ini\n+password = hunter2 \xe9\n+user = me \xe9\n"
    tree = SourceTree("0" * 40, "main", "", patch, ())
    monkeypatch.setattr("megatron.features.run_record.callback.source_tree", lambda *_: tree)
    written = (start(run, tmp_path).folder / "changes.patch").read_bytes()
    assert written == b"diff --git a/a.ini b/a.ini\n+password = ***\n+user = me \xe9\n"


def test_every_start_has_its_own_and_says_how_it_ended(run, tmp_path):
    first = start(run, tmp_path)
    first.end(3, "ValueError: no https://me:word@host")
    (tmp_path / "run" / "002.partial-ab").mkdir()
    second = start(run, tmp_path, ResumePoint(tmp_path / "global_step3", 3, 12))
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == ["001", "002"]
    found = json.loads((first.folder / "record.json").read_text())
    assert (found["last_iteration"], found["end"]) == (3, "ValueError: no https://***@host")
    assert found["ended"] >= found["began"]
    found = json.loads((second.folder / "record.json").read_text())
    assert (found["start"], found["iteration"], found["consumed_samples"]) == (2, 3, 12)
    assert found["loaded"] == f"{tmp_path}/global_step3"


def test_what_cannot_be_written_leaves_nothing(run, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron.features.run_record.callback.sync_path", full)
    with pytest.raises(OSError, match="No space left"):
        start(run, tmp_path)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_record_that_cannot_be_written_is_said(run, tmp_path, caplog):
    saving = dataclasses.replace(run.config.checkpoint, save=str(tmp_path))
    config = dataclasses.replace(run.config, checkpoint=saving)
    own = dataclasses.replace(run, config=config)
    (tmp_path / "run").write_text("a file")
    mesh = types.SimpleNamespace(world=types.SimpleNamespace(rank=0))
    with RunRecorder(own, mesh, ResumePoint(), FILES, PLACES):
        pass
    (record,) = caplog.records
    assert record.getMessage().startswith("the record of this start is missing: ")
    assert (tmp_path / "run").read_text() == "a file"


def test_hosts():
    assert by_host(PLACES) == [
        {"host": "one", "ranks": [0, 1], "devices": ["H100"] * 2, "numbers": [0, 1],
         "processors": 64, "memory_bytes": 10},
        {"host": "two", "ranks": [2], "devices": ["H200"], "numbers": [0], "processors": 32,
         "memory_bytes": 20},
    ]  # fmt: skip


def test_the_map_of_ranks():
    assert rank_map(PLACES) == ["one has ranks 0 to 1: 2 x H100", "two has rank 2: 1 x H200"]
    turns = [RankPlace("ab"[rank % 2], "CPU", None, 1, 1) for rank in range(4)]
    assert rank_map(turns) == ["a has ranks 0, 2: 2 x CPU", "b has ranks 1, 3: 2 x CPU"]
    many = rank_map([RankPlace(str(rank), "CPU", None, 1, 1) for rank in range(70)])
    assert (len(many), many[-1]) == (65, "and 6 hosts more")
