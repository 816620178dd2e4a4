"""lm-eval on our models, on every layout, against its own hf model on Hugging Face's form of the
same weights. Everything that imports lm-eval runs in the pool, whose processes do it once."""

import json
import pickle
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from harness_parts import KINDS, check_equal, ours, own_text, theirs, write_model, write_tasks
from pool import RankError

from megatron.apps.tasks.harness.version_02 import results_02
from megatron.config import ConfigError
from megatron.util.processes import is_main_process

pytest.importorskip("lm_eval", reason="the extra evaluate is not installed")

LAYOUTS = {
    "tp2": ["--tensor-model-parallel-size", "2"],
    "tp2-sp": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "pp2": ["--pipeline-model-parallel-size", "2"],
    "dp2": [],
    "tp2-dp2": ["--tensor-model-parallel-size", "2"],
    "cp2": ["--context-parallel-size", "2"],
}
SIZES = (1, 8)
PROCESSES = {"tp2-dp2": 4}


@pytest.fixture(scope="module")
def made(pool, tmp_path_factory) -> Path:
    """A folder with the model ``hf`` and the tasks ``tasks``."""
    folder = tmp_path_factory.mktemp("harness")
    pool.run(1, make, folder)
    return folder


def make(folder: Path) -> None:
    """For the pool."""
    texts = own_text()
    write_model(folder / "hf", texts)
    write_tasks(folder / "tasks", texts, folder / "hf", documents=8)


def flags(folder: Path, size: int = 8, model: str = "hf") -> list[str]:
    return [
        *("--load", str(folder / model), "--include-path", str(folder / "tasks")),
        *("--tasks", ",".join(KINDS), "--batch-size", str(size), "--bootstrap-iters", "0"),
        *("--log-samples", "--output", str(folder / "results.json")),
    ]


def both(folder: Path, size: int, mutation: str | None = None) -> int:
    """For the pool."""
    with MUTATIONS[mutation]() if mutation else nullcontext():
        own = ours(flags(folder, size=size))
    return check_equal(own, theirs(folder / "hf", folder / "tasks", size))


def test_answers_are_those_of_the_hf_model(pool, made):
    (most_probable,) = pool.run(1, both, made, 8, timeout=300)
    assert most_probable > 0


def other_split():
    """One token of the context belongs to the continuation."""
    from megatron.apps.tasks.harness.model import HarnessModel

    encode = HarnessModel._encode_pair

    def split(model, context, continuation):
        context, continuation = encode(model, context, continuation)
        return context[:-1], context[-1:] + continuation

    return patch.object(HarnessModel, "_encode_pair", split)


def other_truncation():
    """What does not fit is cut off at the end of the context."""
    from megatron.apps.tasks.harness.model import HarnessModel

    cut = HarnessModel._cut

    def from_the_right(model, context, continuation):
        room = len(cut(model, context, continuation).context)
        return cut(model, context[:room], continuation)

    return patch.object(HarnessModel, "_cut", from_the_right)


def no_last_batch():
    """What is left after the last full batch is not computed."""
    from megatron.apps.tasks.harness import scoring

    measure = scoring.measure_texts

    def without_the_last(engine, tokenizer, texts, size, **others):
        found = measure(engine, tokenizer, texts, size, **others)
        for numbers in found.values():
            numbers[len(texts) // size * size :] = 0.0
        return found

    return patch.object(scoring, "measure_texts", without_the_last)


MUTATIONS = {
    "split": other_split,
    "truncation": other_truncation,
    "last batch": no_last_batch,
}


@pytest.mark.proof
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_what_is_wrong_shows(mutation, pool, made):
    with pytest.raises(RankError, match="AssertionError"):
        pool.run(1, both, made, 8, mutation, timeout=900)


def write_documents(folder: Path) -> None:
    """For the pool: documents as people have them, and lm-eval's own tasks with these documents in
    the form of their data sets."""
    import lm_eval.tasks

    data, tasks = folder / "data", folder / "of lm-eval"
    data.mkdir(exist_ok=True)
    tasks.mkdir(exist_ok=True)
    texts = own_text()[:8]
    pages = [
        f" = Title {n} = \n \n {text} @-@ x . \n = = Part = = \n" for n, text in enumerate(texts)
    ]
    rows = {"lambada": [{"text": text} for text in texts], "wikitext": [{"page": p} for p in pages]}
    (data / "wiki.test.raw").write_text("\n".join(pages))
    for name, file in (("lambada", "lambada/lambada_openai"), ("wikitext", "wikitext/wikitext")):
        lines = "".join(json.dumps(row) + "\n" for row in rows[name])
        for path in (data / "lambada_test.jsonl", tasks / f"{name}.jsonl"):
            if path.parent == tasks or name == "lambada":
                path.write_text(lines)
        (tasks / f"{name}.yaml").write_text(
            f"include: {Path(lm_eval.tasks.__file__).parent / file}.yaml\ntask: {name}\n"
            f"dataset_path: json\ndataset_name: null\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: '{tasks / name}.jsonl'}}}}\n"
            "training_split: null\nvalidation_split: null\n"
        )


def by_older_names(folder: Path) -> None:
    """For the pool."""
    own = ours(
        [
            *("--load", str(folder / "hf"), "--include-path", str(folder / "data")),
            *("--task_list", "lambada,wikitext", "--micro-batch-size", "4", "--adaptive_seq_len"),
            *("--bootstrap-iters", "0", "--log-samples", "--output", str(folder / "older.json")),
        ]
    )
    if is_main_process():
        names = ("lambada", "wikitext")
        other = theirs(folder / "hf", folder / "of lm-eval", 4, names)
        for result in (own, other):
            for values in result["results"].values():
                values.pop("alias", None)
        check_equal(own, other)
        in_02 = results_02(own, None)["results"]
        metrics = other["results"]
        assert in_02["lambada"]["ppl"] == pytest.approx(metrics["lambada"]["perplexity,none"], 1e-5)
        words = metrics["wikitext"]["word_perplexity,none"]
        assert in_02["wikitext"]["word_perplexity"] == pytest.approx(words, 1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("processes", (1, 2))
def test_lm_evals_tasks_on_files_by_their_older_names(processes, pool, made):
    pool.run(1, write_documents, made)
    pool.run(processes, by_older_names, made, timeout=900)


@pytest.fixture(scope="module")
def exported(pool, made) -> Path:
    """As ``made``, with the model in this project's format, ``hf`` exported from that, and the hf
    model's results for both batch sizes."""
    pool.run(1, export, made, timeout=900)
    return made


def export(folder: Path) -> None:
    """For the pool."""
    from megatron.formats.conversion.commands import from_hf, to_hf

    from_hf(["--input", str(folder / "hf"), "--output", str(folder / "checkpoints")])
    (folder / "hf").rename(folder / "original")
    to_hf(["--load", str(folder / "checkpoints"), "--output", str(folder / "hf")])
    for size in SIZES:
        found = theirs(folder / "hf", folder / "tasks", size)
        kept = {name: found[name] for name in ("samples", "results")}
        (folder / f"theirs-{size}").write_bytes(pickle.dumps(kept))


def compare(folder: Path, argv: list[str], size: int) -> int:
    """For the pool: main has the results, the others take part."""
    own = ours([*flags(folder, size, model="checkpoints"), *argv])
    if not is_main_process():
        return 0
    return check_equal(own, pickle.loads((folder / f"theirs-{size}").read_bytes()))


@pytest.mark.proof
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_answers_as_the_export(layout, size, pool, exported):
    processes = PROCESSES.get(layout, 2)
    most_probable, *_ = pool.run(processes, compare, exported, LAYOUTS[layout], size, timeout=900)
    assert most_probable > 0


def computed(folder: Path, first: bool) -> int:
    """For the pool: how many requests the model answered itself; the rest are in the cache."""
    from megatron.apps.tasks.harness.scoring import TextScorer

    counts, answers = [0], TextScorer.answers

    def counting(scorer, requests, *args):
        counts.append(len(requests))
        return answers(scorer, requests, *args)

    with patch.object(TextScorer, "answers", counting):
        found = ours([*flags(folder), "--use-cache", str(folder / "answers")])
    if is_main_process():
        kept = folder / "computed"
        if first:
            kept.write_bytes(pickle.dumps({name: found[name] for name in ("samples", "results")}))
        else:
            check_equal(found, pickle.loads(kept.read_bytes()))
    return sum(counts)


def of_another_model(folder: Path) -> None:
    """For the pool."""
    with pytest.raises(ConfigError, match="has the answers of"):
        ours([*flags(folder), "--use-cache", str(folder / "answers"), "--max-length", "32"])


@pytest.mark.proof
@pytest.mark.parametrize("processes", (1, 2))
def test_answers_in_the_cache_are_not_computed_again(processes, pool, made):
    for path in made.glob("answers*"):
        path.unlink()
    (count, *others) = pool.run(processes, computed, made, True, timeout=900)
    assert count > 50 and others == [count] * (processes - 1)
    assert pool.run(processes, computed, made, False, timeout=900) == [0] * processes
    assert [path.name for path in made.glob("answers*")] == ["answers_rank0.db"]
    pool.run(processes, of_another_model, made, timeout=900)


def refused(folder: Path) -> list[str]:
    """For the pool: what is said about tasks that cannot be loaded."""
    from lm_eval.tasks import TaskManager

    from megatron.apps.tasks.harness import tasks

    (folder / "tasks" / "far.yaml").write_text(
        "task: far\ndataset_path: nobody/no-such-data\ntest_split: test\n"
        "output_type: loglikelihood\ndoc_to_text: a\ndoc_to_target: b\n"
    )
    gone = (folder / "tasks" / "cloze.yaml").read_text().replace("cloze", "gone")
    (folder / "tasks" / "gone.yaml").write_text(gone)
    said = []
    for task in ("far", "gone", "wrods"):
        # Reading lm-eval's own task files takes ten seconds.
        quick = patch.object(tasks, "TaskManager", partial(quick_manager, TaskManager))
        with pytest.raises(ConfigError) as error, quick:
            tasks.load_tasks([task], str(folder / "tasks"), None)
        said.append(str(error.value))
    return said


def quick_manager(manager, include_defaults=False, **others):
    return manager(include_defaults=False, **others)


@pytest.mark.proof
def test_tasks_without_data_are_refused(pool, made):
    (said,) = pool.run(1, refused, made, timeout=900)
    far, gone, unknown = said
    assert "would be downloaded" in far and "--include-path" in far
    assert "gone.jsonl" in gone
    assert "no task, group or tag" in unknown and "words" in unknown
