"""The script in the record of a run, which is all that is left of it, trains the same model."""

import json
import subprocess

import pytest
from launched_runs import FLAGS, ROOT, environment, free_port

pytestmark = pytest.mark.proof


@pytest.mark.parametrize("launcher", ["own", "torchrun", "deepspeed"])
def test_the_script_repeats_the_run(tmp_path, launcher):
    save = tmp_path / "a folder" / "save"
    start = {
        "own": ["python", "pretrain_gpt.py", "--num-gpus-per-node", "2"],
        "deepspeed": [
            *("deepspeed", "--num_gpus", "2", "--master_port", free_port()),
            "pretrain_gpt.py",
        ],
        "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py"],
    }[launcher]
    flags = ["--train-iters", "4", "--save", str(save)]
    secret = "hf_" + "x" * 30
    subprocess.run(
        [*start, *FLAGS, *flags],
        cwd=ROOT,
        env=environment() | {"HF_TOKEN": secret, "MEGATRON_UNUSED": "a b'c"},
        check=True,
        timeout=240,
    )
    folder = save / "run" / "001"
    record = json.loads((folder / "record.json").read_text())
    assert record["end"] == "the end of its plan" and "HF_TOKEN" not in record["environment"]
    assert record["hosts"][0]["ranks"] == [0, 1]
    assert not any(secret in path.read_text(errors="replace") for path in folder.iterdir())
    before = losses(save)
    save.rename(tmp_path / "kept")
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    script = tmp_path / "kept" / "run" / "001" / "command.sh"
    subprocess.run([str(script)], cwd="/", env=bare, check=True, timeout=240)
    assert losses(save) == before and before


def losses(save):
    rows = map(json.loads, (save / "metrics.jsonl").read_text().splitlines())
    return [(row["iteration"], row["loss"]) for row in rows if row["kind"] == "train"]
