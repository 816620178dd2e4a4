"""The flags of tools/evaluate.py, and how requests become texts to score."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_tokenizers import small_tokenizers

from megatron.apps.tasks.harness import command
from megatron.apps.tasks.harness.config import SEEDS, HarnessConfig
from megatron.apps.tasks.harness.scoring import TokenRequest, _texts
from megatron.config import ConfigError
from megatron.run.run import RunToolParser

PROGRAM = Path(__file__).parents[3] / "tools" / "evaluate.py"
TASK = """task: sounds
dataset_path: json
test_split: test
dataset_kwargs: {data_files: {test: FOLDER/documents.jsonl}}
output_type: multiple_choice
doc_to_text: "{{animal}}"
doc_to_choice: "{{sounds}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""


def test_the_command_in_a_process_of_its_own(gpt_config, random_gpt, write_checkpoint, tmp_path):
    """Nothing that other tests have imported is there."""
    pytest.importorskip("lm_eval", reason="lm-eval is in the extra evaluate")
    row = {"animal": "A cat", "sounds": [" meows", " barks"]}
    (tmp_path / "documents.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "sounds.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    config = gpt_config(vocab_size=512)
    saved = write_checkpoint(tmp_path / "save", config, random_gpt(config))
    words = ["--load", saved, "--tokenizer-type", "ByteLevel", "--tasks", "sounds"]
    words += ["--include-path", tmp_path, "--output", tmp_path / "results.json"]
    done = subprocess.run(
        [sys.executable, PROGRAM, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["sounds"]["acc,none"] in (0.0, 1.0)


def config(*words: str) -> HarnessConfig:
    return RunToolParser(HarnessConfig, None).parse(["--tasks", "a, b", *words])[0]


def test_flags_of_lm_eval_have_both_spellings():
    found = config("--num_fewshot", "5", "--include_path", ".", "--batch_size", "auto")
    assert found == config("--num-fewshot", "5", "--include-path", ".", "--batch-size", "auto")
    assert found.task_names == ["a", "b"] and found.batch_size is None


def test_batch_size_of_requests_is_the_micro_batch_size_of_a_run():
    found, settings = RunToolParser(HarnessConfig, None).parse(
        ["--tasks", "a", "--micro-batch-size", "4", "--tensor-model-parallel-size", "2"]
    )
    assert found.batch_size == 4
    assert list(settings) == ["tensor_model_parallel_size"]


def test_seeds_and_templates():
    assert config().seeds == list(SEEDS)
    assert config("--seed", "7").seeds == [7] * 4
    assert config("--seed", "0,None,8,52").seeds == [0, None, 8, 52]
    assert (config().template, config().multiturn) == (False, False)
    chat = config("--apply-chat-template")
    assert (chat.template, chat.multiturn) == (True, True)
    assert config("--apply-chat-template", "tools").template == "tools"
    assert not config("--apply-chat-template", "--fewshot-as-multiturn", "false").multiturn
    assert config("--samples", '{"a": [0, 3]}').documents == {"a": [0, 3]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch-size auto:4", "auto needs no second number"),
        ("--batch-size 0", "expected a positive number or auto"),
        ("--limit 3 --samples {}", "give one of them"),
        ("--log-samples", "--log-samples needs --output"),
        ("--predict-only", "--predict-only needs --output"),
        ("--output missing/file.json", "its folder does not exist"),
        ("--include-path missing", "is not a folder"),
        ("--fewshot-as-multiturn", "needs --apply-chat-template"),
        ("--num-fewshot -1", "--num-fewshot -1 must not be negative"),
        ("--seed 1,2", "--seed 1,2: expected a number, or four"),
        ("--samples missing.json", "expected JSON"),
    ],
)
def test_wrong_values_are_named(words, said):
    with pytest.raises(ConfigError, match=said):
        config(*words.split())


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[evaluate\]' in the checkout"):
        command.run_evaluation(None, ["--tasks", "a", "--load", "checkpoints"])


def test_git_does_not_complain_of_a_folder_that_is_no_repository(monkeypatch, tmp_path, capfd):
    loggers = pytest.importorskip("lm_eval.loggers.utils")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert command._git_hash() is None
    monkeypatch.chdir(Path(__file__).parent)
    assert command._git_hash() == loggers.get_git_commit_hash()
    assert capfd.readouterr() == ("", "")


def test_requests_with_one_begin_are_one_text():
    requests = [TokenRequest(*pair) for pair in (
        ([1, 2], [5]), ([1, 2, 3, 4], [5, 6]), ([1, 2], [7]), ([1, 2], [5]), ([1], [2, 5]),
    )]  # fmt: skip
    texts = _texts(requests, share=True)
    assert [text.tokens for text in texts] == [5, 2, 2]
    assert texts[1].last == {5: [0, 3], 7: [2]}
    scored = texts[1].scored(3)
    assert scored.choices.tolist() == [5, 7, 5] and scored.continuation.tolist() == [5]
    assert not len(texts[0].scored(1).choices)
    assert len(_texts(requests, share=False)) == 4


def test_other_weights_in_the_same_folder_are_another_model(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"first")
    first = command.fingerprint(tmp_path, [1])
    (tmp_path / "answers_rank0.db").write_bytes(b"kept")
    (tmp_path / "results.json").write_text("{}")
    assert command.fingerprint(tmp_path, [1]) == first
    assert command.fingerprint(tmp_path, [2]) != first
    os.utime(weights, ns=(1, 1))
    assert command.fingerprint(tmp_path, [1]) != first


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize("last", ["An ans", "An ans  ", "Be brief."])
def test_continued_conversations_end_as_those_of_transformers(last, tmp_path):
    from transformers import AutoTokenizer

    from megatron.apps.tasks.harness.model import HarnessModel
    from megatron.features.tokenizers.huggingface import HFTokenizer

    small_tokenizers(tmp_path)["gpt2"]().save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "chat_template.jinja").write_text(TURNS)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": last},
    ]
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved", trust_remote_code=False)

    def model_with(template):
        (tmp_path / "saved" / "chat_template.jinja").write_text(template)
        made = object.__new__(HarnessModel)
        made.text_tokenizer = HFTokenizer(tmp_path / "saved")
        made.tokenizer = made.text_tokenizer.transformers_tokenizer
        return made

    model = model_with(TURNS)
    for continues in (True, False):
        wanted = theirs.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        assert model.apply_chat_template(messages, add_generation_prompt=not continues) == wanted
    refusing = model_with(NO_SYSTEM + TURNS)
    text = refusing.apply_chat_template(messages, add_generation_prompt=True)
    assert text.startswith("<user>Q</s>") and "Be brief" not in text.partition("<assistant>")[0]
    with pytest.raises(ValueError, match="refuses the conversation: no system"):
        model_with("{{ raise_exception('no system') }}").apply_chat_template(messages)
