"""tools/preprocess_data.py and the pipeline under it, against a plain loop over the lines."""

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from samples import sampled
from tool_modules import load_program

from megatron.apps.corpus.preprocessing.inputs import PreprocessConfig
from megatron.apps.corpus.preprocessing.preprocess import preprocess
from megatron.config import ConfigError, TokenizerConfig
from megatron.data.indexed import IndexedDataset
from megatron.families.gpt import GPTData
from megatron.features.tokenizers.train import train_byte_level_bpe
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.mark import mark_of

ROOT = Path(__file__).parents[4]
TOOL = ROOT / "tools" / "preprocess_data.py"
NULL = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=1000)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> TokenizerConfig:
    """A small byte-level vocabulary."""
    folder = tmp_path_factory.mktemp("vocabulary")
    train_byte_level_bpe([TOOL.read_text()], 400, 2).save_pretrained(folder)
    return TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(folder / "vocab.json"),
        merge_file=str(folder / "merges.txt"),
    )


def write_lines(path: Path, records: list) -> Path:
    lines = (r if isinstance(r, str) else json.dumps(r) for r in records)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def run(path: Path | str, prefix: Path, tokenizer: TokenizerConfig = NULL, **flags):
    return preprocess(
        PreprocessConfig(
            **{"input": (str(path),), "workers": 1, **flags}, output_prefix=str(prefix)
        ),
        tokenizer,
    )


def sequences(prefix: Path | str) -> list[list[int]]:
    return [sequence.tolist() for sequence in IndexedDataset(prefix)]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


# What is written


@pytest.mark.parametrize(
    "workers, block",
    sampled(
        [(1, 1 << 20), (1, 1), (1, 60_000), (2, 2000), (3, 9000)],
        {(1, 60_000), (2, 2000)}.__contains__,
    ),
)
def test_against_loop_over_lines(gpt2, tmp_path, out, monkeypatch, workers, block):
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", block)
    sources = (ROOT / "megatron").rglob("*.py")
    texts = [line for path in sorted(sources)[:8] for line in path.read_text().split("\n\n")]
    texts = [text for text in texts if text] + ["żółć <|endoftext|> 日本", "x" * 30_000, "last"]
    path = write_lines(tmp_path / "in.jsonl", [{"id": i, "text": t} for i, t in enumerate(texts)])
    summary = run(path, out / "a", gpt2, workers=workers, append_eod=True).keys["text"]

    tokenizer = build_tokenizer(gpt2)
    wanted = [[*tokenizer.tokenize(text), tokenizer.eod] for text in texts]
    dataset = IndexedDataset(out / "a_text_document")
    assert sequences(out / "a_text_document") == wanted
    assert dataset.dtype == np.uint16
    assert dataset.document_indices.tolist() == list(range(len(texts) + 1))
    assert (summary.documents, summary.sequences) == (len(texts), len(texts))
    assert summary.tokens == sum(map(len, wanted)) == dataset.num_tokens
    assert summary.text_bytes == sum(len(text.encode()) for text in texts)
    kept = [f"a_text_document.{ending}" for ending in ("bin", "idx", "tokenizer")]
    assert left_in(out) == kept


def test_several_keys_make_a_dataset_each(tmp_path, out):
    path = write_lines(tmp_path / "in.jsonl", [{"q": "1", "a": "2 3"}, {"q": "4", "a": "5"}])
    summary = run(path, out / "p", json_keys=("q", "a"), append_eod=True)
    assert sequences(out / "p_q_document") == [[1, 1000], [4, 1000]]
    assert sequences(out / "p_a_document") == [[2, 3, 1000], [5, 1000]]
    assert {key: s.tokens for key, s in summary.keys.items()} == {"q": 4, "a": 5}


def test_sentences_are_sequences_of_a_document(gpt2, tmp_path, out):
    texts = ["One here. Two there!", "", "  \n ", "Dr. Who came. He left."]
    path = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts])
    summary = run(
        path, out / "p", gpt2, split_sentences=True, sentence_splitter="rules", append_eod=True
    ).keys["text"]
    dataset = IndexedDataset(out / "p_text_sentence")
    tokenizer = build_tokenizer(gpt2)
    found = [tokenizer.detokenize(sequence) for sequence in sequences(out / "p_text_sentence")]
    end = "<|endoftext|>"
    assert found == ["One here.", f"Two there!{end}", "Dr. Who came.", f"He left.{end}"]
    assert dataset.document_indices.tolist() == [0, 2, 4]
    assert (summary.documents, summary.sequences, summary.empty) == (2, 4, 2)


def test_empty_documents_are_counted_and_left_out(tmp_path, out):
    path = write_lines(tmp_path / "in.jsonl", [{"text": t} for t in ("1", "", " ", "2")])
    summary = run(path, out / "p", append_eod=True).keys["text"]
    assert sequences(out / "p_text_document") == [[1, 1000], [2, 1000]]
    assert (summary.documents, summary.empty) == (2, 2)


def test_large_vocabulary_is_int32(tmp_path, out):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "69999"}])
    run(path, out / "p", TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=70_000))
    assert IndexedDataset(out / "p_text_document").dtype == np.int32


def test_blank_lines_and_nan_in_other_fields(tmp_path, out):
    records = ['{"text": "1", "score": NaN}', "", "  ", '{"text": "2", "n": 1e999}']
    run(write_lines(tmp_path / "in.jsonl", records), out / "p")
    assert sequences(out / "p_text_document") == [[1], [2]]


@pytest.mark.realdata
def test_against_file_that_megatron_wrote(realdata, out):
    megatron = realdata / "megatron_indexed"
    tokenizer = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(megatron / "gpt2-tiny-vocab.json"),
        merge_file=str(megatron / "gpt2-tiny-merges.txt"),
    )
    text = realdata / "openwebtext" / "openwebtext-1000.decoded.jsonl"
    run(text, out / "p", tokenizer, append_eod=True)
    for suffix in (".bin", ".idx"):
        ours = out / f"p_text_document{suffix}"
        theirs = megatron / f"meg-gpt2-openwebtext_text_document{suffix}"
        assert ours.read_bytes() == theirs.read_bytes()


# Malformed lines

BAD = [
    ('{"text": "1"', "not JSON"),
    ("just text", "not JSON"),
    ('["1"]', "not a JSON object (found an array)"),
    ("3", "not a JSON object (found 3)"),
    ('{"content": "1", "url": "u"}', 'no key "text" (its keys: "content", "url")'),
    ('{"text": null}', '"text" is not a string (found null)'),
    ('{"text": 5}', '"text" is not a string (found 5)'),
    ('{"text": {"a": 1}}', '"text" is not a string (found an object)'),
    ('{"text": "seven"}', "a text that cannot be tokenized (NullTokenizer reads integers"),
    ("[" * 100_000, "nested too deeply"),
]


@pytest.mark.parametrize(
    "line, message, workers",
    [(*bad, 1) for bad in BAD] + [(*BAD[0], 2), (*BAD[8], 2)],
    ids=lambda value: str(value)[:24],
)
def test_malformed_line_stops(tmp_path, out, monkeypatch, line, message, workers):
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", 50)
    records = [{"text": str(i)} for i in range(30)]
    path = write_lines(tmp_path / "in.jsonl", [*records[:20], line, *records[20:]])
    with pytest.raises(ValueError) as error:
        run(path, out / "p", workers=workers)
    assert f"--input {path}, line 21: {message}" in str(error.value)
    assert left_in(out) == []


def test_surrogate_in_a_text(gpt2, tmp_path, out):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "a"}, '{"text": "a\\ud800"}'])
    with pytest.raises(ValueError, match=r"line 2: a lone surrogate.*ud800"):
        run(path, out / "p", gpt2)


def test_malformed_lines_are_counted_listed_and_left_out(tmp_path, out, monkeypatch, capsys):
    monkeypatch.setattr("megatron.apps.corpus.preprocessing.readers.BLOCK_BYTES", 100)
    records: list = [{"text": str(i)} for i in range(100)]
    for at, (line, _) in zip(range(5, 100, 10), BAD[:9], strict=False):
        records[at] = line
    path = write_lines(tmp_path / "in.jsonl", records)
    summary = run(path, out / "p", on_bad_line="skip")
    bad_numbers = set(range(5, 95, 10))
    assert sequences(out / "p_text_document") == [[i] for i in range(100) if i not in bad_numbers]
    assert summary.bad_lines == {
        "not JSON": 2,
        "not a JSON object": 2,
        'no key "text"': 1,
        '"text" is not a string': 3,
        "a text that cannot be tokenized": 1,
    }
    told = capsys.readouterr().err
    assert "9 malformed lines left out: 2 x not JSON, " in told
    assert f"{path}, line 6: not JSON" in told and "and 4 more" in told


# Flags and files that are wrong


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"input": ()}, "--input is missing"),
        ({"workers": 0}, "--workers 0 must be 1 or more"),
        ({"partitions": 0}, "--partitions 0 must be 1 or more"),
        ({"max_line_bytes": 0}, "--max-line-bytes 0 must be 1 or more"),
        (
            {"partitions": 2, "partition_rank": 2},
            "--partition-rank 2 is not one of the --partitions",
        ),
        ({"input": ("-",), "partitions": 2}, "--partitions 2 cannot divide the standard input"),
        ({"json_keys": ("a", "a")}, "--json-keys a a names a key twice"),
    ],
)
def test_wrong_flags(tmp_path, out, flags, message):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    with pytest.raises(ConfigError, match=message):
        run(path, out / "p", **flags)
    assert left_in(out) == []


def test_append_eod_without_eod(tmp_path, out):
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    tokenizer = TokenizerConfig(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "vocab.json"),
        merge_file=str(tmp_path / "merges.txt"),
    )
    path = write_lines(tmp_path / "in.jsonl", [{"text": "a"}])
    with pytest.raises(ValueError, match=r"--append-eod: --vocab-file .* has no token"):
        run(path, out / "p", tokenizer, append_eod=True)
    assert left_in(out) == []


def test_no_document_at_all(tmp_path, out):
    path = write_lines(tmp_path / "in.jsonl", [{"text": ""}])
    with pytest.raises(ValueError, match=r'no document under the key "text" \(1 empty, 0 malf'):
        run(path, out / "p")
    assert left_in(out) == []


def test_output_folder_cannot_be_made(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}])
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="--output-prefix: cannot write in the folder .*file"):
        run(path, tmp_path / "file" / "p")


# The command


def command(*arguments: str | Path, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, **options)


def test_command(tmp_path, out):
    write_lines(tmp_path / "a.jsonl", [{"body": "1 2"}])
    write_lines(tmp_path / "b.jsonl", [{"body": "3"}])
    done = command(
        *("--input", tmp_path / "a.jsonl", tmp_path / "b*.jsonl", "--output-prefix", out / "p"),
        *("--json-key", "body", "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"),
        *("--append-eod", "--workers", "2", "--dataset-impl", "lazy"),
        *("--chunk-size", "25", "--keep-sequential-samples", "--log-interval", "100"),
    )
    assert done.returncode == 0, done.stderr
    assert sequences(out / "p_body_document") == [[1, 2, 10], [3, 10]]
    assert "2 documents, 5 tokens, 4 bytes" in done.stdout
    assert "--dataset-impl lazy: the mmap format is written instead" in done.stderr


@pytest.mark.parametrize(
    "source, message",
    [("none.jsonl", "--input none.jsonl does not exist"), ("*.none", "--input *.none matches no")],
)
def test_command_says_what_is_wrong_in_one_line(tmp_path, out, source, message):
    done = command(
        *("--input", source, "--output-prefix", out / "p"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "10"),
        cwd=tmp_path,
    )
    assert done.returncode == 1
    assert f"preprocess_data.py: error: {message}" in done.stderr
    assert "Traceback" not in done.stderr and left_in(out) == []


def test_full_disk(tmp_path, out):
    """A file-size limit stands for the disk: writing fails in the middle."""
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 " * 1000}] * 3000)
    done = command(
        *("--input", path, "--output-prefix", out / "p", "--workers", "1"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "10"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert done.returncode == 1
    assert "error: [Errno 27] File too large" in done.stderr
    assert str(out / "p.preprocessing" / "part-0-of-1" / "0-text.bin") in done.stderr
    assert left_in(out) == []


def _running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes in /proc")
@pytest.mark.parametrize("victim", ["parent", "worker"])
def test_killed(tmp_path, out, victim):
    """Nothing is published, no worker outlives its parent, a dead worker ends the run, and the
    next run with the same output clears up."""
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 " * 200_000}] * 100)
    words = ["--input", path, "--output-prefix", out / "p", "--workers", "2"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]
    process = subprocess.Popen(
        [sys.executable, str(TOOL), *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    partial = out / "p.preprocessing" / "part-0-of-1" / "0-text.bin"
    deadline = time.monotonic() + 30
    while not partial.exists() or not partial.stat().st_size:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        pid
        for pid in map(int, children)
        if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(workers) == 2
    os.kill(process.pid if victim == "parent" else workers[0], signal.SIGKILL)
    _, told = process.communicate(timeout=30)
    while any(map(_running, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if victim == "parent":
        assert left_in(out) == ["p.preprocessing"]
        run(write_lines(tmp_path / "in.jsonl", [{"text": "1"}]), out / "p")
        assert left_in(out) == ["p_text_document.bin", "p_text_document.idx"]
    else:
        assert process.returncode == 1 and "was killed by SIGKILL" in told
        assert left_in(out) == []


def test_keyboard_interrupt_leaves_nothing(tmp_path, out, monkeypatch):
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1"}] * 10)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.apps.corpus.preprocessing.preprocess.Progress.update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(path, out / "p")
    assert left_in(out) == []


def test_report_line(tmp_path, out, capsys):
    tool = load_program("tools/preprocess_data.py")
    path = write_lines(tmp_path / "in.jsonl", [{"text": "1 2"}, {"text": ""}])
    tool.report(run(path, out / "p"))
    line = capsys.readouterr().out
    assert "1 documents (1 empty ones left out), 2 tokens, 3 bytes" in line
    assert line.endswith("0.6667 tokens per byte\n")


def test_the_tokenizer_is_kept_next_to_the_index(gpt2, tmp_path):
    """By its ids alone; the files of tokens stay what they were."""
    lines = write_lines(tmp_path / "in", [{"text": f"def f{n}(x): return {n}"} for n in range(20)])
    (tmp_path / "b_text_document.tokenizer").write_text("of earlier files")
    run(lines, tmp_path / "a", gpt2)
    run(lines, tmp_path / "b", gpt2, partitions=3)
    mark = mark_of(build_tokenizer(gpt2), "GPT2BPETokenizer")
    for name in "ab":
        prefix = f"{tmp_path / name}_text_document"
        assert Path(f"{prefix}.tokenizer").read_bytes() == mark.json()
    run(lines, tmp_path / "a", TokenizerConfig("ByteLevelTokenizer"))
    assert json.loads(Path(f"{tmp_path / 'a'}_text_document.tokenizer").read_text()) == {
        "format": 1, "tokenizer_type": "ByteLevelTokenizer", "vocab_size": 259,
        "digest": mark_of(build_tokenizer(TokenizerConfig("ByteLevelTokenizer")), None).digest,
    }  # fmt: skip


def test_data_of_another_tokenizer_are_refused(gpt2, gpt_config, tmp_path, caplog):
    caplog.set_level("INFO", "megatron")
    lines = write_lines(tmp_path / "in", [{"text": f"def f{n}(x): return {n}"} for n in range(20)])
    prefix = f"{tmp_path / 'a'}_text_document"
    run(lines, tmp_path / "a", gpt2)

    def opened(tokenizer: TokenizerConfig) -> IndexedDataset:
        config = dataclasses.replace(gpt_config(), tokenizer=tokenizer)
        return GPTData(config, build_tokenizer(tokenizer)).open_indexed(prefix, None)

    build_tokenizer(gpt2).save_pretrained(tmp_path / "folder")
    folder = TokenizerConfig("HFTokenizer", tokenizer_model=str(tmp_path / "folder"))
    numbers = TokenizerConfig("IdTokenizer", vocab_size=400)
    for tokenizer in (gpt2, folder, numbers):
        assert len(opened(tokenizer)) == 20
    assert "which tokenizer" not in caplog.text
    train_byte_level_bpe([lines.read_text()], 400, 2).save_pretrained(tmp_path / "other")
    other = TokenizerConfig("HFTokenizer", tokenizer_model=str(tmp_path / "other"))
    with pytest.raises(ValueError) as error:
        opened(other)
    for part in (
        f"{prefix}.bin was made with another tokenizer: GPT2BPETokenizer of 400 ids (",
        "and this run has HFTokenizer of ", f"--tokenizer-model {tmp_path / 'other'}",
        f"remove {prefix}.tokenizer if the ids mean the same",
    ):  # fmt: skip
        assert part in str(error.value)
    Path(f"{prefix}.tokenizer").unlink()
    opened(gpt2)
    (said,) = [m for m in caplog.messages if "which tokenizer made it" in m]
    assert said.startswith(f"{prefix}.bin: no a_text_document.tokenizer says which tokenizer")
