"""Folders of tokenizers that are made to run code, end the process or fill the memory."""

import ast
import builtins
import copy
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sentencepiece import sentencepiece_model_pb2

from megatron.features.tokenizers.huggingface import HFTokenizer
from megatron.formats.tokenizer_json import check_tokenizer_json
from megatron.formats.transformers_folder import load_folder
from megatron.util.errors import rust_errors

ROOT = Path(__file__).parents[3]
PROGRAMS = ("megatron", "tools", "tasks", "benchmarks", "compat", "scripts", "openwebtext")
HARMLESS = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "BPE", "unk_token": "u", "vocab": {"a": 0, "b": 1, "u": 2}, "merges": []},
}
WORDS = ("from_pretrained", "from_config", "load_dataset", "load_from_hub", "trust_remote_code")
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
BOMB = [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 900}] * 5


def replace(pattern, content, kind="String"):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def split(pattern):
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
    }  # fmt: skip


def template(single, ids):
    named = {"a": {"id": "a", "ids": ids, "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": named}


def folder_of(folder, **changes):
    content = copy.deepcopy(HARMLESS)
    for name, value in changes.items():
        (content["model"] if name in ("vocab", "merges") else content)[name] = value
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


REFUSED = {
    "an id that is a size": (
        {"vocab": {"a": 0, "u": 2**32 - 6}},
        "has the token id 4,294,967,290, but 2 tokens; ids must be below 1,048,576",
    ),
    "a negative id": ({"vocab": {"a": 0, "u": 1}, "added_tokens": [{"id": -7}]}, "-7"),
    "an added id": ({"added_tokens": [{"id": 2**31, "content": "<x>"}]}, "2,147,483,648"),
    "a step of 10 MB": (
        {"normalizer": replace("a", "b" * 10**7)},
        "its normalizer puts 10,000,000 characters into a text at once",
    ),
    "a long beginning": ({"normalizer": {"type": "Prepend", "prepend": "x" * 2000}}, "2,000"),
    "a table that reads behind its end": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "damaged or cut short",
    ),
    "a decoder that explodes": (
        {"decoder": {"type": "Sequence", "decoders": BOMB}},
        "its decoder may make a text more than 64 times as long",
    ),
    "many tokens around a text": (
        {"post_processor": template([{"SpecialToken": {"id": "a", "type_id": 0}}] * 5000, [0])},
        "5,000 tokens around a text",
    ),
    "an id behind the vocabulary": (
        {"post_processor": template([{"SpecialToken": {"id": "a", "type_id": 0}}], [2**31 - 1])},
        "2,147,483,647",
    ),
    "words without an end": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 2**40}},
        "max_input_chars_per_word",
    ),
    "a pattern that doubles": (
        {"pre_tokenizer": split(r"(a+)+$|(a|aa)+c")},
        "takes too long on a run of 'a'",
    ),
    "a pattern that squares": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(r"[x-z]+(?<=q)")]}},
        "takes too long on a run of 'x'",
    ),
    "a pattern of a normalizer": (
        {"normalizer": replace(r"(?:\w+\w+)+!", "b", "Regex")},
        "takes too long on a run of",
    ),
    "a piece of 140,000 characters": (
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["u", 0.0], ["x" * 140_000, -1.0]]}},
        "has a piece of 140,000 characters; at most 1,024 are accepted",
    ),
    "no model": ({"model": [1]}, "is not a tokenizer.json"),
    "a step of another kind": ({"normalizer": [[]]}, "is not a tokenizer.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_tokenizer_json_out_of_bounds_is_refused(case, tmp_path):
    changes, message = REFUSED[case]
    for change in changes.get("added_tokens", ()):
        change.update(FLAGS, special=True, content="<x>")
    with pytest.raises(ValueError, match="tokenizer.json") as caught:
        HFTokenizer(folder_of(tmp_path, **changes))
    text = str(caught.value)
    assert message in text and text.startswith(f"--tokenizer-model {tmp_path}")
    assert "\n" not in text and len(text) < 500


ORDINARY = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}{1,3}", r"[0-9][0-9][0-9]", r" {2,}",
)  # fmt: skip
"""How published tokenizers split texts."""


@pytest.mark.parametrize("pattern", ORDINARY)
def test_ordinary_patterns_pass(pattern, tmp_path):
    start = time.thread_time()
    check_tokenizer_json(folder_of(tmp_path, pre_tokenizer=split(pattern)) / "tokenizer.json", "x")
    assert time.thread_time() - start < 0.5


FILES_REFUSED = {
    "a file that is a number": ({"fast_tokenizer_files": [1]}, "names the file 1, which is not"),
    "a number in place of files": ({"fast_tokenizer_files": 7}, "names the file 7, which is not"),
    "a file elsewhere": ({"fast_tokenizer_files": ["../x.json"]}, "names the file '../x.json'"),
    "tokens that are compared with each other": (
        {"additional_special_tokens": [str(i) for i in range(200_000)]}, "adds 200,000 tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES_REFUSED)
def test_settings_out_of_bounds_are_refused(case, tmp_path):
    settings, message = FILES_REFUSED[case]
    (folder_of(tmp_path) / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"^--tokenizer-model .*tokenizer_config.json ") as caught:
        HFTokenizer(tmp_path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_large_files_are_not_read(tmp_path):
    folder_of(tmp_path)
    for name in ("vocab.json", "config.json", "chat_template.jinja", "vocab.txt"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(ValueError, match=f"{name} has more than 268,435,456 bytes"):
            HFTokenizer(tmp_path)
        (tmp_path / name).unlink()


def test_a_long_piece_of_sentencepiece_is_refused(tmp_path):
    """Its library tries all ways to halve each piece: minutes for 200,000 characters."""
    model = sentencepiece_model_pb2.ModelProto()
    model.pieces.add(piece="ab" * 100_000, score=-1)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(ValueError, match=r"tokenizer.model has a piece of 200,000 characters"):
        HFTokenizer(tmp_path)


def test_deep_json_is_refused(tmp_path):
    folder_of(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"):
        before = (tmp_path / name).read_text() if (tmp_path / name).is_file() else None
        (tmp_path / name).write_text("[" * 100_000)
        with pytest.raises(ValueError, match=f"{name} is not valid JSON: (nested|depth)"):
            HFTokenizer(tmp_path)
        (tmp_path / name).unlink()
        if before is not None:
            (tmp_path / name).write_text(before)


UNUSABLE = {
    "a pattern without an end": {
        "pre_tokenizer": split(r"(?:\x{0436}\x{0437}|(?:\x{0436}\x{0437}){2})+!")
    },
    "a normalizer that explodes": {"normalizer": {"type": "Sequence", "normalizers": BOMB}},
    "one that matches nothing, often": {
        "normalizer": {"type": "Sequence", "normalizers": [replace("", "b" * 1000, "Regex")] * 3}
    },
    "a table that leads nowhere": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAA="}
    },
    "a name that is nowhere": {
        "post_processor": {
            **template([{"SpecialToken": {"id": "z", "type_id": 0}}], [0]),
            "special_tokens": {},
        }
    },
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_a_library_cannot_encode_names_the_tokenizer(case, tmp_path):
    tokenizer = HFTokenizer(folder_of(tmp_path, **UNUSABLE[case]))
    with pytest.raises(ValueError, match=f"--tokenizer-model {tmp_path}") as caught:
        tokenizer.tokenize("a" * 2000 + "\u0436\u0437" * 2000 + "d!")
    assert "\n" not in str(caught.value)


def test_a_watched_normalizer_encodes_what_it_may(tmp_path):
    """Many small replacements may together explode, and on ordinary text do not."""
    steps = [replace(mark, f" {mark} ") for mark in ",.;:!?"]
    tokenizer = HFTokenizer(
        folder_of(tmp_path, normalizer={"type": "Sequence", "normalizers": steps})
    )
    assert tokenizer._watched is not None
    assert tokenizer.tokenize("a,b") == [0, 2, 2, 2, 1]
    assert len(tokenizer.tokenize("a" * 10_000)) == 10_000


def test_a_decoder_that_panics(tmp_path):
    strip = {"type": "Strip", "content": "a", "start": 10**18, "stop": 10**18}
    tokenizer = HFTokenizer(folder_of(tmp_path, decoder=strip))
    with pytest.raises(ValueError, match="cannot make a text of ids"):
        tokenizer.detokenize([0, 0])


def test_other_exceptions_pass_rust_errors():
    for kind in (KeyboardInterrupt, KeyError, SystemExit):
        with pytest.raises(kind), rust_errors("x"):
            raise kind


@pytest.fixture
def with_code(tmp_path):
    """A folder whose tokenizer is code in it."""
    named = {"AutoConfig": "evil.EvilConfig", "AutoTokenizer": ["evil.Evil", None]}
    config = {"model_type": "evil", "auto_map": named, "architectures": ["Evil"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nEvil = object\n")
    return tmp_path


def test_code_in_a_folder_is_not_run_and_nobody_is_asked(with_code, monkeypatch):
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(sys.stdin, "readline", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match="it needs Python code of its own, which is never run"):
        load_folder(with_code)
    assert not (with_code / "ran").exists()


@pytest.mark.proof
@pytest.mark.parametrize("stdin", ["y\n" * 1000, 'y\n{"text": "a b"}\n'], ids=["yes", "corpus"])
def test_a_corpus_that_says_yes_runs_no_code(stdin, with_code):
    """What is piped into a program is read as text, or not at all."""
    output = with_code / "output"
    words = ["--input", "-", "--output-prefix", output, "--tokenizer-type", "HFTokenizer"]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "preprocess_data.py", *words]
        + ["--tokenizer-model", with_code],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "which is never run" in done.stderr
    assert "[y/N]" not in done.stdout + done.stderr
    assert not (with_code / "ran").exists()


def calls_that_may_run_code(source):
    """Lines that load something of transformers without refusing its code."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        loads = name == "from_pretrained" or name in ("load_dataset", "load_from_hub")
        loads |= name == "from_config" and "auto" in owner.lower()
        refuses = any(
            (word.arg == "trust_remote_code" and ast.unparse(word.value) == "False")
            or (word.arg is None and ast.unparse(word.value) == "how")
            for word in node.keywords
        )
        trusts = any(w.arg == "trust_remote_code" and not refuses for w in node.keywords)
        if (loads and not refuses) or trusts:
            yield node.lineno


def test_no_call_of_the_tree_runs_code_of_a_folder():
    files = [*ROOT.glob("*.py"), *(p for name in PROGRAMS for p in (ROOT / name).rglob("*.py"))]
    assert len(files) > 500
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for text in [path.read_text("utf-8")]
        if any(name in text for name in WORDS)
        for line in calls_that_may_run_code(text)
    ]
    assert not found, "trust_remote_code=False is missing: " + ", ".join(found)


def test_the_check_finds_calls():
    refusing = "AutoTokenizer.from_pretrained(x, trust_remote_code=False)"
    for line in ("AutoTokenizer.from_pretrained(x)", "f(x, trust_remote_code=True)"):
        assert list(calls_that_may_run_code(line)) == [1]
    assert not list(calls_that_may_run_code(refusing))
