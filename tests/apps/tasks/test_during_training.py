"""Which tasks --eval-tasks names, and what is said of a file that cannot be used."""

from types import SimpleNamespace

import pytest
from configs import model_config, run_config

from megatron.apps.tasks.during_training import EvalTasks, TaskEvaluation, prepared_tasks
from megatron.apps.tasks.flags import EvalTasksConfig
from megatron.apps.tasks.report import TaskResult
from megatron.config import ConfigError, TokenizerConfig
from megatron.tokenizer import build_tokenizer

BYTES = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))


def prepared(*words: str, folder=None, **changes):
    tasks = EvalTasksConfig(words, None if folder is None else str(folder), 5, 4, **changes)
    model = model_config(seq_length=8, max_position_embeddings=64)
    return prepared_tasks(run_config(model=model, sections=(tasks,)), BYTES)


def test_tasks_and_their_files(tmp_path):
    (tmp_path / "wikitext.test.tokens").write_text("one two three four five six\n")
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a b a b"}\n')
    (tmp_path / "code.jsonl").write_text('{"text": "x = 1"}\n')
    code = f"code={tmp_path / 'code.jsonl'}"
    wikitext, lambada, code_task = prepared("wikitext,lambada", code, folder=tmp_path)
    assert [task.name for task in (wikitext, lambada, code_task)] == ["wikitext", "lambada", "code"]
    assert len(wikitext.texts) == 6  # 28 bytes: windows of 8 every 4
    assert len(lambada.texts[0].continuation) == 2  # " b", the whole word
    assert len(code_task.texts) == 1


@pytest.mark.parametrize(
    "word, files, message",
    [
        (
            "wikitext",
            [],
            r"must have one file whose name begins with 'wikitext', and has none; wri",
        ),
        ("lambada", ["lambada.a", "lambada.b"], "and has lambada.a, lambada.b; write lambada=FILE"),
        ("code=absent.jsonl", [], "--eval-tasks code=absent.jsonl: there is no such file"),
        ("code=here.txt", ["here.txt"], "which must end in .json or .jsonl"),
        ("lambada=here.jsonl", ["here.jsonl"], "must contain 'lambada'"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, monkeypatch, word, files, message):
    monkeypatch.chdir(tmp_path)
    for name in files:
        (tmp_path / name).write_text('{"text": "a b"}\n')
    with pytest.raises(ConfigError, match=message):
        prepared(word, folder=".")


def test_a_name_alone_needs_the_folder():
    with pytest.raises(ConfigError, match="--eval-tasks lambada needs --eval-tasks-path"):
        prepared("lambada")
    with pytest.raises(ConfigError, match="--eval-tasks-path absent is not a folder"):
        prepared("lambada", folder="absent")


def test_the_cost_is_a_share_of_the_time_before(monkeypatch):
    """Of training, without the evaluations before."""
    clock = [100.0]
    monkeypatch.setattr("megatron.apps.tasks.during_training.time.perf_counter", lambda: clock[0])

    def evaluate(engine, micro_batch_size) -> TaskResult:
        clock[0] += 2.0
        return TaskResult("t", {"accuracy": 0.5}, 3, 100, 2.0)

    found = []
    trainer = SimpleNamespace(
        iteration=5, engine=None, settle=lambda: found.append("settled"), report=found.append
    )
    tasks = EvalTasksConfig(eval_tasks_interval=5)
    callback = EvalTasks(run_config(sections=(tasks,)), BYTES)
    callback._tasks = [SimpleNamespace(evaluate=evaluate)] * 2
    with callback:
        for seconds, trainer.iteration in ((40, 4), (10, 5), (20, 10)):
            clock[0] += seconds
            callback.evaluate(trainer, last=False)
    settled, first, second, again, third, fourth = found
    assert settled == again == "settled"
    assert [each.row()["share_of_time"] for each in (first, second)] == [2 / 50, 2 / 50]
    assert [each.row()["share_of_time"] for each in (third, fourth)] == [2 / 20, 2 / 20]
    assert (first.iteration, third.iteration, third.kind) == (5, 10, "task t")


def test_line_and_row_of_a_task():
    metrics = {"bits_per_byte": 0.5, "accuracy": 0.25}
    found = TaskEvaluation(10, TaskResult("lambada", metrics, 8, 100, seconds=2.0), since=40.0)
    assert found.kind == "task lambada"
    assert found.line() == (
        " task lambada at iteration 10 | bits per byte: 5.000000E-01 | accuracy: 2.500000E-01 | "
        "examples: 8 | tokens per second: 50.0 | elapsed: 2.00 s, 5.0% of the time since "
        "the last evaluation |"
    )
    assert found.row() == metrics | {
        "examples": 8,
        "seconds": 2.0,
        "tokens_per_second": 50.0,
        "share_of_time": 0.05,
    }
