"""tools/generate.py as people call it."""

import dataclasses
import io
import json
import shutil
import sys
from functools import partial

import pytest

from megatron.config import TokenizerConfig
from megatron.inference.generation.command import run_generation
from megatron.tokenizer.null import NullTokenizer


@pytest.fixture(scope="module")
def main():
    """What the program does, without the end of its process."""
    return partial(run_generation, None)


@pytest.fixture(scope="module")
def load(tmp_path_factory, gpt_config, random_gpt, write_checkpoint) -> list[str]:
    """--load of a checkpoint whose tokens are numbers, and few new tokens."""
    save = tmp_path_factory.mktemp("save")
    config = dataclasses.replace(
        gpt_config(), tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=60)
    )
    write_checkpoint(save, config, random_gpt(config), NullTokenizer(60))
    return ["--load", str(save), "--max-new-tokens", "9"]


def test_prompt(main, load, capsys):
    main([*load, "--prompt", "5 6 7", "--greedy"])
    out = capsys.readouterr().out
    assert out.startswith("5 6 7 ") and out.endswith("\n") and len(out.split()) == 12
    main([*load, "--prompt", "5 6 7", "--greedy", "--iteration", "10"])
    assert capsys.readouterr().out == out


def test_a_checkpoint_brings_its_tokenizer(
    main, capsys, tmp_path, gpt_config, random_gpt, write_checkpoint
):
    """Of a run whose tokenizer's files have gone."""
    original = tmp_path / "original"
    NullTokenizer(60).save_pretrained(original)
    files = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(original))
    config = dataclasses.replace(gpt_config(), tokenizer=files)
    write_checkpoint(tmp_path / "save", config, random_gpt(config), NullTokenizer(60))
    shutil.rmtree(original)
    main(["--load", str(tmp_path / "save"), "--prompt", "5 6", "--max-new-tokens", "2"])
    assert capsys.readouterr().out.startswith("5 6 ")


def test_empty_prompt_starts_a_document(main, load, capsys):
    main([*load, "--prompt", "", "--greedy"])
    assert len(capsys.readouterr().out.split()) == 9


def test_sampling_flags_act(main, load, capsys):
    outputs = []
    for flags in (
        [],
        ["--seed", "7"],
        ["--temperature", "0.01"],
        ["--top-k", "1"],
        ["--top-p", "0.0001"],
        ["--greedy"],
    ):
        main([*load, "--prompt", "5", *flags])
        outputs.append(capsys.readouterr().out)
    assert outputs[0] != outputs[1] != outputs[5]
    assert outputs[2] == outputs[3] == outputs[4] == outputs[5]


def test_prompt_file_and_output(main, load, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("1 2\n3\n")
    output = tmp_path / "texts.jsonl"
    flags = ["--prompt-file", str(tmp_path / "prompts.txt"), "--num-samples", "2"]
    main([*load, *flags, "--output", str(output)])
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(r["prompt"], r["sample"]) for r in records] == [
        ("1 2", 0), ("1 2", 1), ("3", 0), ("3", 1)
    ]  # fmt: skip
    for record in records:
        assert record["text"] == "".join(f" {token}" for token in record["tokens"])
        assert record["ended"] or len(record["tokens"]) == 9
    assert records[0]["tokens"] != records[1]["tokens"]
    capsys.readouterr()
    main([*load, *flags])
    printed = capsys.readouterr().out
    assert all(f"{record['prompt']}{record['text']}\n" in printed for record in records)


def test_json_prompts_may_have_several_lines(main, load, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1\n2"}) + "\n")
    main([*load, "--prompt-file", str(path), "--output", str(tmp_path / "texts.jsonl")])
    assert json.loads((tmp_path / "texts.jsonl").read_text())["prompt"] == "1\n2"


PROMPT = "Context prompt (stop to exit) >>> "


def test_interactive(main, load, capsys, monkeypatch):
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("5 6\nnot numbers\n" + "1 " * 20 + "\n7\nstop\n8\n")
    )
    main([*load, "--greedy"])
    out, err = capsys.readouterr()
    assert "5 6 " in out and "\n" in out
    assert out.count(PROMPT) == 5
    assert "error: NullTokenizer reads integers" in err
    assert "at most --max-new-tokens 4" in err


def test_the_same_line_again_gives_another_text(main, load, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("5\n5\n"))
    main(load)
    first, second = capsys.readouterr().out.split(PROMPT)[1:3]
    assert first != second
    monkeypatch.setattr(sys, "stdin", io.StringIO("5\n5\n"))
    main(load)
    assert capsys.readouterr().out.split(PROMPT)[1:3] == [first, second]


def test_longer_than_the_model_leaves_nothing(main, load, tmp_path):
    output = tmp_path / "texts.jsonl"
    with pytest.raises(ValueError, match="--max-new-tokens 24 after a prompt of 1 tokens"):
        main([*load[:2], "--max-new-tokens", "24", "--prompt", "5", "--output", str(output)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "1"], "--load is missing"),
        (["--load", "x", "--prompt", "1"], "--load x has no checkpoint: name a checkpoint"),
        (["--load", "x", "--prompt", "1", "--prompt-file", "y"], "give one of them"),
        (["--load", "x", "--output", "y"], "--output needs --prompt or --prompt-file"),
        (["--load", "x", "--prompt-file", "absent"], "absent"),
        (["--load", "x", "--max-new-tokens", "0"], "--max-new-tokens 0 must be positive"),
        (
            ["--load", "x", "--greedy", "--top-k", "3"],
            "--greedy does not sample; remove it or --top-k",
        ),
        (["--load", "x", "--greedy", "--num-samples", "3"], "3 --greedy: all would be equal"),
        (["--load", "x", "--temperature", "0"], "--temperature 0.0 must be positive"),
    ],
)
def test_bad_command_lines(main, flags, message):
    with pytest.raises((ValueError, OSError), match=message):
        main(flags)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "has no prompt"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "1"}\n{"text": "1"}\n', "line 2 is not of the form"),
        ("a.jsonl", b"{\n", "line 1 is not of the form"),
        ("a.jsonl", b'{"prompt": 3}\n', "line 1 is not of the form"),
    ],
)
def test_bad_prompt_files(main, load, name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, OSError), match=message):
        main([*load, "--prompt-file", str(tmp_path / name)])
