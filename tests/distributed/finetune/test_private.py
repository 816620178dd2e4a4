"""Private things on a machine are in no output: files, variables and words with a
mark are planted wherever a run could meet them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from finetune_cases import QUICK, save_base, save_data, tune

from megatron.apps.dashboard.records import newest_record, read_record
from megatron.features.resilience.watch.reports import write_report

pytest.importorskip("transformers")
MARK = "c4n4ry"
ADDRESS = f"https://me:{MARK}@host/x?access_token={MARK}"
VARIABLES = {
    "HF_TOKEN": f"{MARK}-token", "AWS_SECRET_ACCESS_KEY": f"{MARK}-aws", "MY_DIARY": MARK,
    "WANDB_API_KEY": f"{MARK}-wandb", "WANDB_NOTES": MARK, "MEGATRON_API_KEY": f"{MARK}-key",
    "SLURM_JOB_ACCOUNT": MARK, "SLURM_JOB_COMMENT": MARK, "MLFLOW_TRACKING_PASSWORD": MARK,
    "MEGATRON_MIRROR": ADDRESS, "NCCL_DEBUG": "WARN", "HOME": f"/home/{MARK}", "PWD": f"/{MARK}",
}  # fmt: skip


def plant(folder: Path) -> None:
    """Files of several kinds that no command names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (
        ".env", "customers.json", "notes.txt", "README.md", "settings.yaml", "own.py",
        "rows.jsonl", "tokenizer_notes.json", "requirements.txt", ".git-credentials",
    ):  # fmt: skip
        (folder / name).write_text(f"{MARK} = '{MARK}'\n")


def checkout(folder: Path) -> Path:
    """A source tree with changes: the package, a new module that is imported, other new files."""
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "__init__.py").write_text("old = 1\n")
    (folder / "job.sh").write_text("run\n")

    def git(*words: str) -> None:
        own = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *own, "-C", str(folder), *words], check=True, capture_output=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "first")
    plant(folder), plant(folder / "runs")
    (folder / "megatron" / "__init__.py").write_text("new = 2\n")
    (folder / "job.sh").write_text(f"export WANDB_API_KEY={MARK}\ncurl {ADDRESS}\n")
    (folder / "plugin.py").write_text("imported = 3\n")
    return folder


def tune_among_private_things(argv: list[str], tree: Path) -> None:
    """finetune.py in a process with marked variables and words; for the pool."""
    package = SimpleNamespace(__file__=str(tree / "megatron" / "__init__.py"), __version__="1")
    plugin = SimpleNamespace(__file__=str(tree / "plugin.py"))
    words = ["finetune.py", MARK, "--password", MARK]
    with (
        patch.dict(os.environ, VARIABLES),
        patch.dict(sys.modules, {"plugin_of_a_test": plugin}),
        patch.object(sys, "argv", words),
        patch.object(sys, "orig_argv", ["python", "-c", MARK, *words]),
        patch("megatron.features.run_record.callback.megatron", package),
    ):
        tune(argv)


def test_nothing_private_is_in_any_output(pool, tmp_path):
    base, output = save_base(tmp_path / "base"), tmp_path / "tuned"
    data = tmp_path / "data"
    data.mkdir()
    rows = save_data(data)["sft"]
    for folder in (base, data, tmp_path):
        plant(folder)
    tree = checkout(tmp_path / "tree")
    argv = [
        *("--model", str(base), "--data", rows, "--output", str(output), "--lora"),
        *(*QUICK, "--train-iters", "2", "--eval-interval", "2", "--tracker-project", ADDRESS),
    ]
    pool.run(1, tune_among_private_things, argv, tree)
    with patch.dict(os.environ, VARIABLES):
        write_report("hang", f"it ends by an error: no {ADDRESS} for {MARK}-token", str(output))
    start = newest_record(output / "checkpoints" / "metrics.jsonl")
    (output / "shown.json").write_text(json.dumps(read_record(start)))
    record = json.loads((start / "record.json").read_text())
    files = [path for path in output.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"README.md", "report.html", "adapter_config.json", "state.json", "command.sh"} <= names
    assert any(name.startswith("hang-") for name in names)
    with_mark = [path for path in files if MARK in str(path) or MARK.encode() in path.read_bytes()]
    assert with_mark == []
    hidden = "https://***@host/x?access_token=***"
    assert record["environment"]["NCCL_DEBUG"] == "WARN"
    assert record["environment"]["MEGATRON_MIRROR"] == hidden
    assert record["command"][1:] == ["finetune.py", *argv[:-1], hidden]
    changes = (start / "changes.patch").read_text()
    assert all(line in changes for line in ("+new = 2", "+imported = 3", "export WANDB_API_KEY="))
    assert record["git"]["left_out"] == []
    saved = output / "checkpoints" / "global_step2" / "tokenizer"
    tokenizer = {path.name for path in saved.iterdir()}
    assert tokenizer == {
        *("tokenizer.json", "tokenizer_config.json", "mark.json", "generation_config.json")
    }
