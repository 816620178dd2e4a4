"""Programs in messages and help texts, spelled for an installation without the checkout."""

import sys

import pytest
from setup_arguments import ROOT, setup_arguments

from megatron.config.command_line import CommandParser
from megatron.util import errors
from megatron.util.errors import as_commands, path_of, spelled

NAMES = {
    "tools/plan.py": "megatron-plan",
    "tools/retro/preprocess_data.py": "megatron-preprocess-retro",
    "tools/preprocess_data.py": "megatron-preprocess-data",
    "pretrain_gpt.py": "megatron-pretrain-gpt",
    "tasks/main.py": "megatron-run-task",
}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("python tools/plan.py --gpus 8", "megatron-plan --gpus 8"),
        ("see tools/plan.py, which", "see megatron-plan, which"),
        ("run tools/retro/preprocess_data.py", "run megatron-preprocess-retro"),
        ("plan.py: error: --gpus 0", "megatron-plan: error: --gpus 0"),
        ("deepspeed pretrain_gpt.py --bf16", "deepspeed --module pretrain_gpt --bf16"),
        (
            "torchrun --nproc_per_node 8 pretrain_gpt.py",
            "torchrun --nproc_per_node 8 -m pretrain_gpt",
        ),
        ("deepspeed --num_gpus=2 pretrain_gpt.py", "deepspeed --num_gpus=2 --module pretrain_gpt"),
        ("a checkpoint of pretrain_gpt.py", "a checkpoint of megatron-pretrain-gpt"),
        # Files of the reader's own, and programs that are not installed, keep their names.
        ("/me/tools/plan.py and my-tools/plan.py", "/me/tools/plan.py and my-tools/plan.py"),
        ("torchrun train.py, python tools/other.py", "torchrun train.py, python tools/other.py"),
        ("tools/plan.pyc", "tools/plan.pyc"),
    ],
)  # fmt: skip
def test_spelled_as_commands(text, expected):
    assert as_commands(text, NAMES) == expected


def test_a_checkout_keeps_its_paths():
    assert errors.in_checkout()
    assert spelled("python tools/plan.py") == "python tools/plan.py"


def test_paths_of_all_commands_exist():
    """Each command of setup.py is a program of the checkout, and paths lead back to it."""
    scripts = setup_arguments()["entry_points"]["console_scripts"]
    modules = [script.split(" = ")[1].removesuffix(":main") for script in scripts]
    paths = [path_of(module) for module in modules]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert len(set(paths)) == len(paths)


def test_help_and_errors_name_commands(monkeypatch, capsys):
    """Where there is no checkout: the help text, and whatever a program writes to stderr."""
    monkeypatch.setattr(errors, "in_checkout", lambda: False)
    monkeypatch.setattr(errors, "commands", lambda: NAMES)
    parser = CommandParser("Plans.\n\n    python tools/plan.py --gpus 8", prog="megatron-plan")
    assert "\n    megatron-plan --gpus 8" in parser.format_help()
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    errors.name_output()
    print("plan.py: error: no data; python tools/preprocess_data.py makes them", file=sys.stderr)
    print("tools/plan.py")  # what a program computes is never changed
    shown = capsys.readouterr()
    assert shown.err == "megatron-plan: error: no data; megatron-preprocess-data makes them\n"
    assert shown.out == "tools/plan.py\n"
