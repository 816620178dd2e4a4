"""Documents of lm-eval's tasks in local files, the names and the results of lm-eval 0.2."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tool_modules import load_program

from megatron.apps.tasks.harness import command, version_02
from megatron.apps.tasks.harness.config import HarnessConfig
from megatron.apps.tasks.harness.documents import articles, file_in, rows_of
from megatron.apps.tasks.harness.tasks import _reading
from megatron.config import ConfigError
from megatron.run.run import RunToolParser

SIZES = "--num-layers --hidden-size --num-attention-heads --seq-length --max-position-embeddings"
COMMAND = """--load runs/moe --fp16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 1
    --no-pipeline-parallel --moe-expert-parallel-size 1 --vocab-file vocab.json --merge-file
    merges.txt --micro-batch-size 12 --no-load-optim --no-load-rng --inference
    --disable-moe-token-dropping --adaptive_seq_len --eval_fp32 --task_list lambada,wikitext
    --results_path results.json --deepspeed --deepspeed_config ds.json --num_fewshot 0""".split()


def parsed(*words):
    return RunToolParser(HarnessConfig, None).parse(words)


def test_the_command_of_megatron_deepspeed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    content = {"train_batch_size": 256, "fp16": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    sizes = [word for flag in SIZES.split() for word in (flag, "-1")]
    monkeypatch.setattr(command, "require_harness", lambda: None)
    monkeypatch.setattr(command, "start_processes", lambda settings, argv: 2)
    config, settings, processes = command.parsed(None, [*COMMAND, *sizes])
    assert (config.task_names, config.tasks_flag) == (["lambada", "wikitext"], "--task_list")
    assert (config.batch_size, config.fewshot, processes) == (12, 0, 2)
    left = {name: setting.value for name, setting in settings.items()}
    assert not {"num_layers", "hidden_size", "seq_length", "deepspeed_config"} & left.keys()
    assert left["tensor_model_parallel_size"] == 2 and "fp16" not in left, "--eval_fp32"
    with pytest.raises(ConfigError, match=r"--results_path /proc/r\.json: cannot write to /proc"):
        command.parsed(None, [*COMMAND, "--results_path", "/proc/r.json"])


def test_the_dtype_is_that_of_the_json_and_few_shot_is_0(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 256, "bf16": {"enabled": True}}))
    config, settings = parsed("--task_list", "sst", "--deepspeed_config", str(path))
    assert command.without_training(settings)["bf16"].value is True
    assert config.fewshot == 0 and parsed("--tasks", "sst2")[0].fewshot is None
    with pytest.raises(ConfigError, match=r"missing\.json: file not found"):
        command.without_training(
            parsed("--task_list", "a", "--deepspeed_config", "missing.json")[1]
        )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tasks a --task_list b", "--tasks and --task_list: give one of them"),
        ("--task_list ,", "--task_list is missing"),
        ("--task_list a --results_path missing/r.json", "--results_path missing/r.json: its"),
        ("--task_list a --results_path .", "is a folder"),
    ],
)
def test_wrong_values_are_named(words, said):
    with pytest.raises(ConfigError, match=said):
        parsed(*words.split())


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("lambada", "lambada_openai"),
        ("hendrycksTest-anatomy", "mmlu_anatomy"),
        ("math_geometry", "hendrycks_math_geometry"),
        ("mathqa", "mathqa"),
        ("hellaswag", "hellaswag"),
    ],
)
def test_names_of_02(old, today):
    assert version_02.name_today(old) == today


def pages_of_the_data_set(text):
    """The pages of EleutherAI's wikitext_document_level, by the rule of its script."""
    pages, lines = [], []
    for line in text.split("\n"):
        plain = line.replace("= = =", "===").replace("= =", "==").strip()
        if plain.startswith("= ") and plain.endswith(" ="):
            pages.append("\n".join(lines))
            lines = []
        lines.append(line)
    return [page for page in [*pages, "\n".join(lines)] if page.strip()]


def test_articles_of_a_wikitext(tmp_path):
    text = " \n = A = \n \n It is = here .\n = = Part = = \n x\n = = = P = = = \n = odd = = \n"
    text += " = B b = \n \n y\n"
    assert articles(text) == pages_of_the_data_set(text) and len(articles(text)) == 2
    path = tmp_path / "wiki.test.raw"
    path.write_text(text)
    assert rows_of("wikitext", path, "--tasks") == [{"page": page} for page in articles(text)]
    assert file_in(str(tmp_path), "wikitext", "--tasks") == path
    assert file_in(str(tmp_path), "wiki", "--tasks") is None, "rows, not text"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "x"}\n{"text"', "line 2 is not valid JSON"),
        ("a.jsonl", "[1]", "expected a JSON object for each document"),
        ("a.jsonl", "", "expected a JSON object for each document"),
        ("a.txt", "x", r"must end in \.jsonl, \.json, \.parquet"),
        ("b.jsonl", None, "there is no such file"),
    ],
)
def test_files_that_are_no_documents(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"--task_list lambada=.*{said}"):
        rows_of("lambada", tmp_path / name, "--task_list")


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        (SimpleNamespace(tags={"b_easy", "a_hard"}, cfg=None), "a_hard, b_easy$"),
        (
            SimpleNamespace(tags=set(), cfg={"task": [f"q{n}" for n in range(9)]}),
            "q0, q1, q2, q3, q4, q5 and 3 more$",
        ),
    ],
)
def test_a_file_of_several_tasks(entry, shown):
    manager = SimpleNamespace(all_subtasks=[], task_index={"many": entry})
    with pytest.raises(ConfigError, match=f"--tasks many=a.jsonl: many is several .*: {shown}"):
        _reading("many", Path("a.jsonl"), manager, "--tasks")


def test_two_files_of_a_task(tmp_path):
    for name in ("lambada_a.jsonl", "lambada_b.json", "lambada.md"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match="lambada_a.jsonl, lambada_b.json; write lambada=FILE"):
        file_in(str(tmp_path), "lambada", "--tasks")


RESULTS = {
    "results": {
        "lambada": {
            "alias": "lambada", "sample_len": 2, "perplexity,none": 2.5,
            "perplexity_stderr,none": "N/A", "acc,none": 0.5, "acc_stderr,none": 0.25,
        },
        "triviaqa": {"exact_match,remove_whitespace": 0.125, "exact_match,other": 0.5},
        "piqa": {"acc,none": 0.75, "acc_stderr,none": 0.0, "acc_norm,none": 1.0},
    },
    "versions": {"lambada": 1.0, "piqa": 0},
    "n-shot": {"lambada": 0, "triviaqa": 0, "piqa": 0},
    "config": {"limit": None, "batch_size": "12"},
}  # fmt: skip


def test_results_in_the_form_of_02():
    converted = version_02.results_02(RESULTS, "runs/moe")
    assert converted["results"] == {
        "lambada": {"ppl": 2.5, "acc": 0.5, "acc_stderr": 0.25},
        "triviaqa": {"acc": 0.125},
        "piqa": {"acc": 0.75, "acc_stderr": 0.0, "acc_norm": 1.0},
    }
    assert converted["versions"] == RESULTS["versions"]
    assert converted["config"]["num_fewshot"] == 0 and converted["config"]["model"] == "runs/moe"


@pytest.mark.parametrize("form", ["0.2", "0.4"])
def test_results_as_a_table(form, tmp_path, capsys, monkeypatch):
    program = load_program("tasks/eval_harness/report-to-csv.py")
    results = version_02.results_02(RESULTS, None) if form == "0.2" else RESULTS
    (tmp_path / "r.json").write_text(json.dumps(results))
    program.main([str(tmp_path / "r.json")])
    assert "r.csv: " in capsys.readouterr().out
    rows = list(csv.reader(io.StringIO((tmp_path / "r.csv").read_text())))
    assert rows[0] == ["task", "metric", "value", "err", "version"]
    assert ["lambada", "acc", "0.5", "0.25", "1.0"] in rows
    assert ["piqa", "acc_norm", "1.0", "", "0"] in rows
    assert not [row for row in rows if row[1] == "ppl"]
    (tmp_path / "other.json").write_text('{"loss": 1}')
    (tmp_path / "list.json").write_text('{"results": {"a": {"acc": 1}}, "versions": ["0"]}')
    for words, said in (
        ("other.json", "has no results of tasks"),
        ("no.json", "no such file"),
        ("list.json", '"versions" must be an object'),
        ("r.json --output /proc/none/r.csv", "--output /proc/none/r.csv: cannot write to"),
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as ended:
            program.main(words.split())
        assert ended.value.code == 2 and said in capsys.readouterr().err
