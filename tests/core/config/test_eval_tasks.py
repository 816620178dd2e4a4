"""The flags of tasks that are evaluated while training."""

import pytest

from megatron.apps.tasks.flags import EvalTasksConfig
from megatron.config import FLAG_CLASSES, ConfigError, FlagParser, resolve

MINIMAL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --train-iters 100 --lr 1e-3 --eval-interval 7"
)


def tasks_of(extra: str) -> EvalTasksConfig:
    settings = FlagParser(*FLAG_CLASSES).settings(f"{MINIMAL} {extra}".split())
    return resolve(settings, 1).config.section(EvalTasksConfig)


@pytest.mark.parametrize("between", [",", " ", ", "])
def test_commas_and_spaces(between):
    words = ("wikitext=a/wiki.test.tokens", "lambada", "code=b.jsonl")
    found = tasks_of(f"--eval-tasks {between.join(words)} --eval-tasks-path folder")
    assert found.files == {"wikitext": "a/wiki.test.tokens", "lambada": None, "code": "b.jsonl"}
    assert (found.eval_tasks_interval, found.eval_tasks_stride) == (7, 32)


def test_without_tasks_nothing_is_derived():
    assert tasks_of("") == EvalTasksConfig()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--eval-tasks-interval 5", "--eval-tasks-interval 5 has an effect with --eval-tasks only"),
        ("--eval-tasks a=x.json,a=y.json", "names a task twice"),
        ("--eval-tasks =x.json", "a task without a name; write NAME=FILE"),
        ("--eval-tasks a=x.json --eval-tasks-stride 33", "--eval-tasks-stride 33 is above --seq"),
        ("--eval-tasks a=x.json --eval-tasks-interval 0", "--eval-tasks-interval 0 must be positi"),
    ],
)
def test_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        tasks_of(flags)
