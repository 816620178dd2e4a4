"""The command line of tasks/main.py: its flags, what a checkpoint gives, what is refused."""

import pytest
from tool_modules import load_program

from megatron.apps.tasks.command import TASKS, run_task
from megatron.apps.tasks.config import TaskConfig
from megatron.config import ConfigError, ModelFlags, Setting
from megatron.config.flags import build
from megatron.features.evaluation.checkpoints import checkpoint_settings, evaluation_settings
from megatron.run.run import RunToolParser


def parsed(*words):
    return RunToolParser(TaskConfig, None).parse([str(word) for word in words])


def test_the_tasks_meaning_of_a_flag_wins():
    config, settings = parsed(
        *("--task", "MNLI", "--train-data", "a.tsv", "--valid-data", "b.tsv", "c.tsv"),
        *("--epochs", 0, "--lr", "1e-5", "--num-layers", 2),
    )
    assert (config.train_data, config.valid_data) == (("a.tsv",), ("b.tsv", "c.tsv"))
    assert config.epochs == 0
    assert settings.keys() == {"lr", "num_layers"}


def test_help_is_about_the_task(capsys):
    with pytest.raises(SystemExit):
        run_task(load_program("tasks/main.py").__doc__, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--valid-data STR [STR ...] Files or folders to evaluate on." in text
    assert "Like --train-data, for validation" not in text and "--hidden-size" not in text
    assert all(name in text for name in TASKS)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_of_the_list_exists(name):
    assert callable(TASKS[name]())


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "--task is missing: WIKITEXT103, LAMBADA"),
        (["--task", "LAMBDA"], "--task LAMBDA: .*; the nearest is LAMBADA"),
        (["--task", "RAW", "--overlapping-eval", "0"], "--overlapping-eval 0 must be positive"),
        (["--task", "RAW", "--epochs", "-1"], "--epochs -1 must not be negative"),
        (["--task", "RAW"], "--load is missing: name a checkpoint, or describe .*--num-layers"),
        (["--task", "RAW", "--load", "nowhere"], "--load nowhere: no such folder"),
        (["--task", "RAW", "--num-layers", "2"], "--task RAW needs --valid-data"),
        (
            ["--task", "RAW", "--num-layers", "2", "--valid-data", "x", "--model-family", "bert"],
            r"--task RAW measures .* of the family bert \(--model-family\) does not continue any",
        ),
    ],
)
def test_command_lines_that_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        run_task(None, words)


def test_the_checkpoint_describes_the_model(gpt_config, random_gpt, write_checkpoint, tmp_path):
    config = gpt_config()
    folder = write_checkpoint(tmp_path / "save", config, random_gpt(config))
    _, settings = parsed("--load", folder)
    found = checkpoint_settings(settings)
    assert found["use_checkpoint_args"].value is True
    assert found["family"] == Setting("gpt", f"--load {folder}")
    _, settings = parsed("--load", folder, "--num-layers", 7)
    given = checkpoint_settings(settings)
    assert "use_checkpoint_args" not in given and build(ModelFlags, given).num_layers == 7


def test_what_an_evaluation_uses_of_a_trainings_flags():
    config, settings = parsed(
        *("--train-iters", 10, "--lr", 1, "--global-batch-size", 5, "--data-path", "x"),
        *("--save", "there", "--save-interval", 3, "--eval-interval", 4, "--fp16"),
        *("--micro-batch-size", 3, "--eval-micro-batch-size", 2, "--text-key", "body"),
        *("--no-load-optim", "--eval-iters", 7, "--profile"),
    )
    used, unused = evaluation_settings(settings, config.eval_micro_batch_size)
    assert used.keys() == {
        *("fp16", "micro_batch_size", "eval_batch_size", "text_key", "load_optim", "eval_iters"),
        *("skip_train", "zero_stage"),
    }
    assert used["micro_batch_size"].value == 2
    assert sorted(unused) == sorted(
        ["--train-iters", "--lr", "--global-batch-size", "--data-path", "--save"]
        + ["--save-interval", "--eval-interval", "--profile"]
    )


@pytest.mark.parametrize("given, size", [({}, 8), ({"--eval-batch-size": 3}, 3)])
def test_the_batch_size_has_a_default(given, size):
    config, settings = parsed(*(word for pair in given.items() for word in pair))
    used, _ = evaluation_settings(settings, config.eval_micro_batch_size)
    assert used["micro_batch_size"].value == used["eval_batch_size"].value == size
