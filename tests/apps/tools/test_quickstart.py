"""tools/quickstart.py: its flags, its commands, its last line. tests/e2e runs it."""

import json
from pathlib import Path

import pytest
from tool_modules import load_program

from megatron.apps.quickstart import commands
from megatron.apps.quickstart.commands import QuickstartFolder, training_commands
from megatron.apps.quickstart.corpus import HeldOut
from megatron.config import FLAG_CLASSES, FlagParser, resolve
from megatron.engine import deepspeed_json
from megatron.engine.deepspeed_file import read_json

ROOT = Path(__file__).parents[3]
REFERENCE = HeldOut(tokens=139_264, text_bytes=439_000, unigram_entropy=6.39)


@pytest.fixture(scope="module")
def quickstart():
    return load_program("tools/quickstart.py")


@pytest.fixture(autouse=True)
def in_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def refused(quickstart, *argv):
    with pytest.raises(SystemExit) as error:
        quickstart.main(argv)
    return str(error.value)


def test_bad_input(quickstart, tmp_path):
    assert "--train-iters 7 must be even" in refused(quickstart, "--train-iters", "7")
    empty = refused(quickstart, "--sources", str(tmp_path), "--output", str(tmp_path / "out"))
    assert f"{tmp_path} contains no .py files" in empty


def test_without_the_checkout_commands_are_those_of_the_package(tmp_path, monkeypatch):
    """No word of them names a file of the checkout, and the others stay as they are."""
    assert commands.in_checkout_folder()
    at = QuickstartFolder(tmp_path)
    typed = [*commands.data_commands(at), *training_commands(at, 640, REFERENCE)]
    monkeypatch.chdir(tmp_path)
    assert not commands.in_checkout_folder()
    names = {"tools/train_tokenizer.py": "megatron-train-tokenizer", "pretrain_gpt.py": "-"}
    names |= {f"tools/{n}.py": n for n in ("preprocess_data", "convert_checkpoint")}
    monkeypatch.setattr(commands, "commands", lambda: names)
    packaged = [commands.installed(command) for command in typed]
    assert not [w for c in packaged for w in c.words if w.endswith((".py", ".json"))
                and not w.startswith(str(tmp_path))]  # fmt: skip
    assert [c.words[0] for c in packaged] == [
        "megatron-train-tokenizer", "preprocess_data", "deepspeed", "deepspeed",
        "convert_checkpoint", "python",
    ]  # fmt: skip
    train = packaged[2].words
    assert train[train.index("--module") :][:4] == ("--module", "pretrain_gpt", "--zero-stage", "1")
    assert packaged[2].reads == () and packaged[-1].words == typed[-1].words


def test_fresh_removes_only_a_quickstart(quickstart, tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    message = refused(quickstart, "--fresh", "--output", str(tmp_path))
    assert "is not a folder of a quickstart: not removed" in message
    assert (tmp_path / "thesis.txt").exists()


def test_training_command_resolves(tmp_path):
    """Flags and JSON go together, and each evaluation reads what the split has."""
    words = training_commands(QuickstartFolder(tmp_path), 640, REFERENCE)[0].words
    flags = words[words.index("pretrain_gpt.py") + 1 :]
    settings = FlagParser(*FLAG_CLASSES).settings(flags)
    content = read_json(str(commands.DEEPSPEED_CONFIG))
    settings = deepspeed_json.merge(settings, content, str(commands.DEEPSPEED_CONFIG), 2)
    config = resolve(settings, int(words[words.index("--num_gpus") + 1])).config
    assert config.engine.zero_stage == 1
    assert config.training.exit_interval == config.training.train_iters // 2
    assert config.training.eval_iters * 8 * 256 == REFERENCE.tokens
    assert config.logging.metrics_file == str(tmp_path / "metrics.jsonl")


def test_one_gpu_is_not_shared(monkeypatch, tmp_path):
    monkeypatch.setattr(commands.torch.cuda, "device_count", lambda: 1)
    words = training_commands(QuickstartFolder(tmp_path), 640, REFERENCE)[0].words
    assert words[words.index("--num_gpus") + 1] == "1"
    assert words[words.index("--micro-batch-size") + 1] == "8"


def test_last_line_and_picture(quickstart, tmp_path, capsys):
    at = QuickstartFolder(tmp_path)
    rows = [
        {"kind": "train", "iteration": 1, "consumed_tokens": 2048, "loss": 7.0},
        {"kind": "validation", "iteration": 1, "consumed_tokens": 2048, "loss": 6.0},
        {"kind": "validation", "iteration": 2, "consumed_tokens": 1_310_720, "loss": 3.964},
    ]
    at.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quickstart.report(at, REFERENCE)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "quickstart: validation loss 3.96 (unigram 6.39, bits per byte 1.81), 1.3M tokens, "
        f"exported to {tmp_path}/hf"
    )
    assert at.picture.read_bytes().startswith(b"\x89PNG")
