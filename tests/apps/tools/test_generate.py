"""tools/generate.py as people call it."""

import dataclasses
import errno
import io
import json
import shutil
import sys
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from generation_models import VOCAB, their_model
from transformers import AutoModelForCausalLM

from megatron.apps.generation.generation.command import run_generation
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError, TokenizerConfig
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer
from megatron.formats.conversion.output import write_checkpoint
from megatron.tokenizer.plain import NullTokenizer


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
        (["--load", "x", "--prompt", "1"], "--load x: no such folder; name a checkpoint"),
        (["--load", "x", "--prompt", "1", "--prompt-file", "y"], "give one of them"),
        (["--load", "x", "--output", "y"], "--output needs --prompt or --prompt-file"),
        (["--load", "x", "--prompt-file", "absent"], "absent"),
        (["--load", "x", "--max-new-tokens", "0"], "--max-new-tokens 0 must be positive"),
        (
            ["--load", "x", "--greedy", "--top-k", "3"],
            "--greedy does not sample; remove it or --top-k",
        ),
        (["--load", "x", "--greedy", "--num-samples", "3"], "3 --greedy: all would be equal"),
        (["--load", "x", "--temperature", "0"], "temperature 0.0 must be positive"),
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


@pytest.fixture(scope="module")
def words(tmp_path_factory, gpt_config, random_gpt, write_checkpoint) -> list[str]:
    """--load of a checkpoint whose tokens are those of GPT-2's kind: bytes, pieces of text, and
    <|endoftext|>."""
    folder = tmp_path_factory.mktemp("words")
    tokenizer = train_byte_level_bpe(["one two three. four"] * 9, vocab_size=260, min_frequency=2)
    tokenizer.save_pretrained(folder / "tokenizer")
    files = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder / "tokenizer"))
    config = dataclasses.replace(gpt_config(tokenizer.vocab_size), tokenizer=files)
    write_checkpoint(folder, config, random_gpt(config), tokenizer)
    return ["--load", str(folder), "--out-seq-length", "9"]


class WithTemplate(NamedTuple):
    """A tokenizer whose files have a chat template."""

    tokenizer: Any

    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        (folder / "chat_template.jinja").write_text(
            "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}"
            "{% if add_generation_prompt %}a{% endif %}"
        )


@pytest.fixture(scope="module")
def instruct(tmp_path_factory, gpt_config, random_gpt, write_checkpoint) -> list[str]:
    folder = tmp_path_factory.mktemp("instruct")
    tokenizer = WithTemplate(train_byte_level_bpe(["one two."] * 9, 260, min_frequency=2))
    tokenizer.save_pretrained(folder)
    files = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(folder))
    config = dataclasses.replace(gpt_config(260), tokenizer=files)
    write_checkpoint(folder / "save", config, random_gpt(config), tokenizer)
    return ["--load", str(folder / "save"), "--greedy"]


def test_a_conversation_is_the_prompts_that_its_template_makes(main, instruct, capsys, monkeypatch):
    def continued(prompt):
        main([*instruct, "--prompt", prompt, "--max-new-tokens", "3"])
        return capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")

    first = continued("uone.a")
    second = continued(f"uone.a{first}.ut.a")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\nt\n"))
    main([*instruct, "--chat", "--max-new-tokens", "3"])
    shown = "Message (stop to exit) >>> "
    assert capsys.readouterr().out == f"{shown}{first}\n{shown}{second}\n{shown}\n"
    main([*instruct, "--chat", "--max-new-tokens", "3", "--prompt", "one"])
    assert capsys.readouterr().out == f"{first}\n"


def test_an_answer_has_all_the_room_of_the_model(main, instruct, capsys, tmp_path):
    (tmp_path / "m.txt").write_text("one\n")
    flags = ["--prompt-file", str(tmp_path / "m.txt"), "--output", str(tmp_path / "rows.jsonl")]
    main([*instruct, "--chat", *flags])
    (row,) = rows_of(tmp_path / "rows.jsonl")
    assert row["prompt"] == "one" and (row["ended"] or len(row["tokens"]) > 9)


def test_a_chat_needs_a_template(main, words):
    with pytest.raises(ConfigError, match="has no chat template; name an instruct model"):
        main([*words, "--chat", "--prompt", "one"])
    with pytest.raises(ConfigError, match="--chat and --genfile: give messages by --prompt"):
        main([*words, "--chat", "--genfile", "x"])


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_unconditional_samples_as_megatron_writes_them(main, words, capsys, tmp_path):
    """generate_samples_gpt.py: new documents, which begin with the end of the one before."""
    flags = "--num-samples 5 --top_p 0.9 --temperature 1.0 --micro-batch-size 2".split()
    main([*words, *flags, "--genfile", str(tmp_path / "out.jsonl")])
    rows = rows_of(tmp_path / "out.jsonl")
    assert [list(row) for row in rows] == [["text", "all_text", "prompt", "id"]] * 5
    assert [(row["prompt"], row["id"]) for row in rows] == [("", number) for number in range(5)]
    assert all(row["all_text"] == row["text"] for row in rows)
    assert all(row["text"].startswith("<|endoftext|>") for row in rows)
    assert len({row["text"] for row in rows}) == 5
    assert "out.jsonl: 5 texts" in capsys.readouterr().out
    main(
        [
            *words,
            *flags,
            "--micro-batch-size",
            "1",
            "--genfile",
            str(tmp_path / "new" / "alone.jsonl"),
        ]
    )
    assert rows_of(tmp_path / "new" / "alone.jsonl") == rows


def test_samples_of_prompts_as_megatron_writes_them(main, words, capsys, tmp_path):
    texts = ["one two", "three.", "one two", ""]
    lines = [json.dumps({"prompt": {"text": text, "toxicity": 0.1}}) for text in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    flags = ["--sample-input-file", str(tmp_path / "prompts.jsonl")]
    unused = "--recompute --max-tokens-to-oom 1200000 --inference-batch-times-seqlen-threshold 4"
    main([*words, *flags, *unused.split()])
    rows = rows_of(tmp_path / "prompts.jsonl.out")
    assert [(row["prompt"], row["id"]) for row in rows] == list(zip(texts, range(4), strict=True))
    assert all(row["all_text"] == row["prompt"] + row["text"] for row in rows)
    assert rows[0]["text"] != rows[2]["text"]
    out = capsys.readouterr().out
    for flag in ("--recompute", "--max-tokens-to-oom", "--inference-batch-times-seqlen-threshold"):
        assert f"{flag} is accepted and not used: " in out
    flags += ["--sample-output-file", str(tmp_path / "two.jsonl"), "--greedy", "--num-samples"]
    main([*words, *flags, "2"])
    rows = rows_of(tmp_path / "two.jsonl")
    assert [row["prompt"] for row in rows] == texts[:2]
    capsys.readouterr()
    main([*words, *flags, "9"])
    assert "prompts.jsonl has 4 prompts" in capsys.readouterr().out
    assert rows_of(tmp_path / "two.jsonl")[:2] == rows


def test_what_ends_a_text_is_part_of_it_as_in_megatron(main, words, tmp_path):
    """Of texts drawn almost uniformly some end early."""
    flags = ["--num-samples", "300", "--temperature", "50", "--genfile", str(tmp_path / "o.jsonl")]
    main([*words, *flags])
    ended = [row["text"] for row in rows_of(tmp_path / "o.jsonl") if row["text"].count("<|end") > 1]
    assert ended and all(text.endswith("<|endoftext|>") for text in ended)


def test_plain_lines_are_prompts_too(main, words, tmp_path):
    """As generate_samples.py of 2019 had them."""
    (tmp_path / "in").write_text("one\ntwo three\n")
    main([*words, "--sample-input-file", str(tmp_path / "in")])
    assert [row["prompt"] for row in rows_of(tmp_path / "in.out")] == ["one", "two three"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--genfile a --prompt b", "--prompt and --genfile: give one of them"),
        ("--sample-output-file a", "--sample-output-file needs --sample-input-file"),
        ("--genfile a --num-samples -1", "--num-samples -1 must not be negative"),
        ("--prompt a --num-samples 0", "--num-samples 0 and --prompt: nothing would be written"),
        ("--prompt a --iteration 3 --load-tag iter_3", "--iteration 3 and --load-tag iter_3"),
        ("--sample-input-file absent", "absent does not exist"),
        ("--prompt a --top_p 1.5", "--top-p 1.5 .* must be in"),
        ("--genfile in/out.jsonl", "--genfile in/out.jsonl: cannot write to in"),
        ("--prompt a --output .", r"--output \. is a folder; name a file"),
    ],
)
def test_more_bad_command_lines(main, words, flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").write_text("a")
    with pytest.raises((ValueError, OSError), match=message):
        main([*words, *flags.split()])
    assert list(tmp_path.iterdir()) == [tmp_path / "in"]


def test_rows_of_another_kind(main, words, tmp_path):
    (tmp_path / "in").write_text('{"prompt": {"text": "a"}}\n{"text": "a"}\n')
    with pytest.raises(ValueError, match='line 2 is not of the form {"prompt": {"text": "..."}}'):
        main([*words, "--sample-input-file", str(tmp_path / "in")])


def test_a_terminal_that_cannot_be_read(main, load, monkeypatch):
    """torchrun starts its processes in a session of their own."""

    def read(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("builtins.input", read)
    with pytest.raises(ConfigError, match=r"cat \| torchrun"):
        main(load)


def test_t5_continues_what_its_encoder_read(main, tmp_path, capsys):
    """As transformers' generate, from a folder of Hugging Face."""
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat is red dog blue and . a".split()
    words += [f"##{n}" for n in range(VOCAB - len(words) - 7)]
    tokenizer = WordPieceTokenizer({word: n for n, word in enumerate(words)}, True, 5)
    theirs = their_model("t5")
    theirs.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    wanted = theirs.generate(
        torch.tensor([[*tokenizer.tokenize("the cat is <extra_id_0>"), tokenizer.eos]]),
        max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos,
    )  # fmt: skip
    flags = ["--load", str(tmp_path), "--greedy", "--out-seq-length", "6"]
    (tmp_path / "in").write_text("the cat is <extra_id_0>\n")
    main([*flags, "--prompt-file", str(tmp_path / "in"), "--output", str(tmp_path / "out")])
    (row,) = rows_of(tmp_path / "out")
    assert row["tokens"] == wanted[0, 1:].tolist()


@pytest.mark.parametrize("form", ["folder", "checkpoint"])
def test_texts_end_where_the_model_says(main, tmp_path, form):
    """At any of the tokens at which transformers' generate ends them."""
    theirs, folder = their_model("llama"), tmp_path / "theirs"
    prompt = torch.tensor([[5, 7, 9]])
    free = theirs.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, 3:]
    theirs.save_pretrained(folder)
    NullTokenizer(60).save_pretrained(folder)
    ends = [60, next(t for t in free.tolist()[3:] if t not in free[:3])]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    wanted = theirs.generate(prompt, max_new_tokens=9, do_sample=False, pad_token_id=0)[0, 3:]
    assert 3 < len(wanted) < 9 and wanted[-1] == ends[1]
    if form == "checkpoint":
        folder = write_checkpoint(tmp_path / "ours", open_checkpoint(folder)).parent
    main([
        *("--load", str(folder), "--prompt", "5 7 9", "--greedy", "--max-new-tokens", "9"),
        *("--output", str(tmp_path / "out")),
    ])  # fmt: skip
    (row,) = rows_of(tmp_path / "out")
    assert row["tokens"] == wanted[:-1].tolist() and row["ended"]


def test_no_samples_without_a_prompt(main, load, tmp_path, capsys, monkeypatch):
    """As Megatron-DeepSpeed's generate_text.sh asks for it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("5 6 7\n"))
    flags = "--num-samples 0 --use-tutel --ds-inference --recompute --greedy".split()
    main([*load, *flags, "--genfile", str(tmp_path / "samples.json")])
    out = capsys.readouterr().out
    assert not (tmp_path / "samples.json").exists() and "samples.json is not written" in out
    assert out.count("Context prompt") == 2 and "5 6 7 " in out
    assert "--use-tutel is accepted and not used" in out
    (tmp_path / "in.txt").write_text("5 6\n7 8\n")
    prompts = ["--sample-input-file", str(tmp_path / "in.txt")]
    main([*load, *flags, *prompts, "--genfile", str(tmp_path / "samples.json")])
    assert len((tmp_path / "in.txt.out").read_text().splitlines()) == 2
