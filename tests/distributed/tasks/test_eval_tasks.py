"""--eval-tasks: training stays bitwise what it is, and the numbers are those of tasks/main.py."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from training_jobs import train

from megatron.apps.tasks.command import run_task

LENGTH = 32
MODEL = (
    f"--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length {LENGTH} --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --init-method-std 0.1 "
    "--tokenizer-type ByteLevelTokenizer"
).split()
COURSE = (
    "--mock-data --num-workers 0 --train-iters 6 --eval-iters 1 --eval-interval 4 --log-interval 1 "
    "--peak-tflops 1"
).split()
"""Dropout is on, by default."""
LAYOUTS = {
    "one": (1, ""),
    "dp2-zero1": (2, "--zero-stage 1"),
    "dp2-zero3": (2, "--zero-stage 3"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2-sp-dp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "cp2": (2, "--context-parallel-size 2"),
}
EVERY_TIME = {"dp2-zero3"}
"""Checked by every test run; the others are proofs."""
LAYOUT = pytest.mark.parametrize(
    "layout", [n if n in EVERY_TIME else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS]
)
ALONE = {"wikitext": "WIKITEXT103", "lambada": "LAMBADA", "code": "RAW"}
OPTIONS = {"wikitext": ["--overlapping-eval", str(LENGTH)], "lambada": ["--strict-lambada"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Numbers of texts that fill no batch, of several lengths."""
    folder = tmp_path_factory.mktemp("sets")
    words = ["the cat sat on the mat .", "a dog @-@ like beast ( large ) ran , and ran"]
    (folder / "wiki.tokens").write_text(" \n = Title = \n \n " + " \n ".join(words * 4) + " \n")
    rows = [
        "one two three four",
        "a b a b",
        "no the end is the end",
        "caf\u00e9 au lait",
        "to be be",
    ]
    for name, texts in (("lambada", rows), ("code", [row * 5 for row in rows])):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return {
        "wikitext": folder / "wiki.tokens",
        "lambada": folder / "lambada.jsonl",
        "code": folder / "code.jsonl",
    }


def tasks_of(files: dict[str, Path]) -> list[str]:
    named = ",".join(f"{name}={path}" for name, path in files.items())
    return ["--eval-tasks", named, "--eval-tasks-interval", "3"]


def main_py(argv: list[str]) -> None:
    """tasks/main.py with these flags; for the pool."""
    sys.argv = ["tasks/main.py", *argv]
    run_task(None, argv)


def evaluate_py(argv: list[str]) -> None:
    """tools/evaluate.py with these flags; for the pool."""
    from megatron.apps.tasks.harness.command import run_evaluation

    sys.argv = ["tools/evaluate.py", *argv]
    run_evaluation(None, argv)


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured(folder: Path) -> dict[tuple[str, int], dict]:
    rows = (row for row in rows_of(folder) if row["kind"].startswith("task "))
    return {(row["kind"].removeprefix("task "), row["iteration"]): row for row in rows}


def metrics_of(pool, folder: Path, task: str, path: Path) -> dict[int, dict[str, float]]:
    """What tasks/main.py measures with each checkpoint of a folder, on one process."""
    argv = ["--task", ALONE[task], "--valid-data", str(path), "--load", str(folder)]
    argv += ["--all-iterations", "--output", str(folder / f"{task}.json")]
    argv += OPTIONS.get(task, [])
    pool.run(1, main_py, argv)
    assert (folder / f"{task}.png").stat().st_size > 5000
    found = {}
    for evaluation in json.loads((folder / f"{task}.json").read_text())["evaluations"]:
        (result,) = evaluation["tasks"].values()
        iteration = evaluation["model"]["iteration"]
        assert evaluation["model"]["checkpoint"] == str(folder / f"global_step{iteration}")
        found[iteration] = result["metrics"] | {"examples": result["examples"]}
    return found


@LAYOUT
def test_training_stays_as_it_is_and_the_numbers_are_those_of_main(pool, files, layout, tmp_path):
    """Losses, norms, weights and moments of a run with tasks, dropout included, are those of the
    run without; it evaluates after iteration 3 and at the end, 6; and each number is what
    tasks/main.py finds in the checkpoint of that iteration."""
    size, flags = LAYOUTS[layout]
    argv = [*MODEL, *COURSE, *flags.split()]
    without = pool.run(size, train, [*argv, "--metrics-file", str(tmp_path / "metrics.jsonl")])
    folder = tmp_path / "with"
    saving = ["--save", str(folder), "--save-interval", "3"]
    with_tasks = pool.run(size, train, [*argv, *saving, *tasks_of(files)])
    for one, other in zip(without, with_tasks, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert one.state.keys() == other.state.keys()
        assert all(np.array_equal(one.state[name], other.state[name]) for name in one.state)
    held_out = [
        [row["loss"] for row in rows_of(each) if row["kind"] in ("validation", "test")]
        for each in (tmp_path, folder)
    ]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 3
    found = measured(folder)
    assert list(found) == [(name, iteration) for iteration in (3, 6) for name in files]
    alone = {task: metrics_of(pool, folder, task, path) for task, path in files.items()}
    assert [list(each) for each in alone.values()] == [[3, 6]] * 3
    for (task, iteration), row in found.items():
        wanted = alone[task][iteration]
        assert {name: row[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
        assert row["seconds"] > 0 and row["tokens_per_second"] > 0
        assert 0 < row["bits_per_byte"] < 20


@pytest.mark.proof
def test_a_resumed_run_evaluates_where_the_whole_one_does(pool, files, tmp_path):
    """And continues bitwise."""
    argv = [*MODEL, *COURSE, *tasks_of({"lambada": files["lambada"]})]
    whole = pool.run(1, train, [*argv, "--metrics-file", str(tmp_path / "metrics.jsonl")])[0]
    saving = ["--save", str(tmp_path / "x"), "--load", str(tmp_path / "x")]
    pool.run(1, train, [*argv, *saving, "--exit-interval", "4"])
    assert list(measured(tmp_path / "x")) == [("lambada", 3)]
    resumed = pool.run(1, train, [*argv, *saving])[0]
    assert resumed.losses == whole.losses[4:]
    assert all(np.array_equal(resumed.state[name], whole.state[name]) for name in whole.state)
    numbers = [
        {key: row["bits_per_byte"] for key, row in measured(each).items()}
        for each in (tmp_path, tmp_path / "x")
    ]
    assert numbers[0] == numbers[1] and list(numbers[0]) == [("lambada", 3), ("lambada", 6)]


CHOICES = [
    {"q": "the sky is", "choices": ["blue", "a fish", "green"], "answer": 0},
    {"q": "two and two are", "choices": ["five", "four"], "answer": 1},
    {"q": "cats", "choices": ["fly", "meow"], "answer": 1},
]


@pytest.mark.proof
@pytest.mark.parametrize("layout", ["one", "tp2-sp-dp2", "pp2"])
def test_tasks_of_lm_eval(pool, layout, tmp_path):
    """A name alone is a task of lm-eval's; training stays bitwise what it is, and the numbers are
    those of tools/evaluate.py."""
    pytest.importorskip("lm_eval", reason="lm-eval is in the extra evaluate")
    size, flags = LAYOUTS[layout]
    rows = "".join(json.dumps(row) + "\n" for row in CHOICES)
    (tmp_path / "choices.jsonl").write_text(rows)
    (tmp_path / "local_choice.yaml").write_text(
        "task: local_choice\ndataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'choices.jsonl'}}}}}\n"
        "output_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: '{{answer}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n"
    )
    argv = [*MODEL, *COURSE, *flags.split()]
    without = pool.run(size, train, argv)
    tasks = ["--eval-tasks", "local_choice", "--eval-tasks-path", str(tmp_path)]
    saving = ["--save", str(tmp_path / "x")]
    with_tasks = pool.run(size, train, [*argv, *saving, *tasks])
    for one, other in zip(without, with_tasks, strict=True):
        assert (one.losses, one.norms) == (other.losses, other.norms)
        assert all(np.array_equal(one.state[name], other.state[name]) for name in one.state)
    found = measured(tmp_path / "x")
    assert list(found) == [("local_choice", 4), ("local_choice", 6)]
    output = tmp_path / "results.json"
    argv = ["--load", str(tmp_path / "x"), "--tasks", "local_choice", "--output", str(output)]
    pool.run(1, evaluate_py, [*argv, "--include-path", str(tmp_path)])
    wanted = json.loads(output.read_text())["results"]["local_choice"]
    last = found["local_choice", 6]
    assert (last["acc"], last["acc_norm"]) == (wanted["acc,none"], wanted["acc_norm,none"])
    assert last["examples"] == 3
