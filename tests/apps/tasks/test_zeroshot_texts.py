"""What the zero-shot tasks ask a model: their files, and files that cannot be used."""

import json
import math

import numpy as np
import pytest
from configs import model_config

from megatron.apps.tasks.zeroshot.tasks import prepare
from megatron.config import TokenizerConfig
from megatron.features.raw_text.flags import RawTextConfig
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.gpt2_bpe import CHARACTER_OF_BYTE, GPT2BPETokenizer

BYTES = GPT2BPETokenizer(
    {token: i for i, token in enumerate([*CHARACTER_OF_BYTE, "<|endoftext|>"])}, []
)
EOD = 256


def write_lines(path, texts, key="text"):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def prepared(task, path, *, stride=4, strict=True, tokenizer=BYTES, length=8, **options):
    model = model_config(seq_length=length, max_position_embeddings=options.pop("longest", length))
    return prepare(task, [path], tokenizer, model, stride, strict, **options)


def pairs(task):
    """Contexts and continuations as text."""
    return [
        tuple(bytes(part.tolist()).decode() for part in (text.context, text.continuation))
        for text in task.texts
    ]


@pytest.mark.parametrize(
    "text, context, word",
    [
        ("the cat saw the cat", "the cat saw the", " cat"),
        ("she said nothing.\n\n  Nothing.  \n", "she said nothing.", " Nothing."),
        ("caf\u00e9 \u00a0na\u00efve", "caf\u00e9", " na\u00efve"),
        ('"Stop," he said, "stop!"', '"Stop," he said,', ' "stop!"'),
        ("a\u2003\u65e5\u672c", "a", " \u65e5\u672c"),
    ],
)
def test_the_last_word_and_what_is_before_it(text, context, word, tmp_path):
    path = write_lines(tmp_path / "lambada/test.jsonl", [text])
    task = prepared("lambada", path, longest=99)
    assert pairs(task) == [(context, word)]
    plain = prepared("lambada", path, strict=False, longest=99)
    (text_of_task,) = plain.texts
    assert bytes([*text_of_task.context, *text_of_task.continuation]) == text.encode()
    assert len(text_of_task.continuation) == 1


def test_long_contexts_are_cut_at_their_beginning_and_counted(tmp_path):
    path = write_lines(tmp_path / "lambada.jsonl", ["one two", "one two three", "a b", "abcde fgh"])
    task = prepared("lambada", path)
    # 8 inputs and the last label, which is not one of them: 9 tokens.
    assert pairs(task) == [("one", " two"), ("two", " three"), ("a", " b"), ("abcde", " fgh")]
    assert "1 of them are longer than the 8 positions" in task.notes[1]
    result = task.result(np.full(4, -1.0), np.array([4.0, 5.0, 1.0, 4.0]), 1.0)
    assert result.details["contexts_cut"] == 1 and result.examples == 4
    assert result.metrics["accuracy"] == 0.5  # " b" has two tokens, of which one is right
    dashes, line, _ = result.lines
    assert line == (
        " validation results on LAMBADA | number correct: 2.0000E+00 | "
        "total examples: 4.0000E+00 | avg accuracy: 5.0000E-01"
    )
    assert dashes == "-" * (len(line) + 1)


def test_wikitext_counts_words_at_spaces_and_bytes_of_the_file(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_bytes("\n = A = \n one , two @-@ three \u00b0 \r\n".encode())
    task = prepared("wikitext", path)
    detokenized = "\n= A =\none, two-three\u00b0\r\n"
    assert "tokens: 10, number of detokenized tokens: 25" in task.notes[0]
    assert sum(len(text.continuation) for text in task.texts) == len(detokenized.encode()) - 1
    result = task.result(np.full(len(task.texts), -2.0), np.zeros(len(task.texts)), 1.0)
    loss = 2.0 * len(task.texts) / 24
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-15)
    assert result.metrics["token_ratio"] == 24 / 9
    assert result.metrics["adjusted_perplexity"] == pytest.approx(
        math.exp(loss * 24 / 9), rel=1e-14
    )
    assert result.lines[1] == (
        f" validation results on WIKITEXT103 | avg loss: {loss:.4E} | ppl: {math.exp(loss):.4E} | "
        f"adjusted ppl: {math.exp(loss * 24 / 9):.4E} | token ratio: {24 / 9} |"
    )
    text_bytes = len("= A = \n one , two @-@ three \u00b0".encode())
    bits = 2.0 * len(task.texts) / math.log(2) / text_bytes
    assert result.metrics["bits_per_byte"] == pytest.approx(bits, rel=1e-14)


def test_documents_of_json_are_one_stream(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["abc", "de", "fghi"], key="body")
    raw = RawTextConfig(text_key="body")
    stream = [*b"abc", EOD, *b"de", EOD, *b"fghi", EOD]
    task = prepared("json", path, raw=raw)
    scored = np.concatenate([text.continuation for text in task.texts])
    assert [int(task.texts[0].context[0]), *scored.tolist()] == stream
    result = task.result(np.full(2, -3.0), np.zeros(2), 1.0)
    assert result.metrics["loss"] == 6 / 11 and result.details["documents"] == 3
    assert result.lines[1] == (
        " validation loss at the end of training for test data | LM loss: 5.454545E-01 | "
        "LM PPL: 1.725392E+00"
    )
    assert result.metrics["bits_per_byte"] == pytest.approx(6 / math.log(2) / 9)
    without = prepared("json", path, raw=RawTextConfig(eval_text_key="body", append_eod=False))
    assert without.texts.targets == 8
    part = prepared("json", path, raw=raw, most_windows=1)
    assert (
        part.texts.targets == 8
        and "bits_per_byte" not in part.result(np.zeros(1), np.zeros(1), 1.0).metrics
    )


CASES = {
    "no lambada": ("lambada", "test.jsonl", '{"text": "a b"}', "must contain 'lambada'"),
    "not JSON": ("lambada", "lambada.jsonl", '{"text": "a b"}\n\nx', r"jsonl, line 3: not JSON"),
    "key": ("lambada", "lambada.jsonl", '{"txt": "a"}', r'line 1: no key "text" \(.*"txt"'),
    "number": ("json", "x.jsonl", '{"text": 1}', r'line 1: "text" is not a string'),
    "array": ("json", "x.json", '[{"text": "a"}]', r"line 1: .*one JSON array.*JSON lines"),
    "empty": ("lambada", "lambada.jsonl", "\n \n", "is empty: it must have a JSON object"),
    "empty text": ("wikitext", "wiki.txt", " \n", "is empty: name a file with text"),
    "one word": ("wikitext", "wiki.txt", "word", "1 words and 4 tokens; .* at least two"),
    "one passage": ("lambada", "lambada.jsonl", '{"text": " hi "}', "line 1: nothing comes before"),
    "blank passage": ("lambada", "lambada.jsonl", '{"text": ""}', "line 1: nothing comes before"),
    "long word": ("lambada", "lambada.jsonl", '{"text": "a 123456789"}', "label has 10 tokens"),
    "no document": ("json", "x.jsonl", "", "is empty"),
    "one token": ("json", "x.jsonl", '{"text": ""}', "has 1 token; a perplexity needs"),
    "missing": ("wikitext", "missing/wiki.txt", None, "missing/wiki.txt"),
}


@pytest.mark.parametrize("task, name, content, message", CASES.values(), ids=CASES)
def test_files_that_cannot_be_used(task, name, content, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # whose own path contains the test's name
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, OSError), match=message):
        prepared(task, name)


def test_text_that_is_not_utf8_names_the_line(tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_bytes(b"a b\nc \xff d")
    with pytest.raises(ValueError, match="wiki.txt, line 2: not UTF-8"):
        prepared("wikitext", path)


def test_a_label_without_tokens_is_refused(tmp_path):
    vocab = {token: i for i, token in enumerate([*CHARACTER_OF_BYTE, "<|endoftext|>"])}
    del vocab["x"]
    path = write_lines(tmp_path / "lambada.jsonl", ["a b", "a box"])
    with pytest.raises(ValueError, match=r"line 2: the last word is 'box', .* lacks a token"):
        prepared("lambada", path, tokenizer=GPT2BPETokenizer(vocab, []))


def test_a_tokenizer_without_an_end_of_document(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", ["ab"])
    tokenizer = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))
    vocab = {token: i for i, token in enumerate(CHARACTER_OF_BYTE)}
    with pytest.raises(ValueError, match="--task RAW puts .*--no-append-eod"):
        prepared("json", path, tokenizer=GPT2BPETokenizer(vocab, []))
    assert prepared("json", path, tokenizer=tokenizer).texts.targets == 2


def test_other_families_and_several_files_are_refused(tmp_path):
    path = tmp_path / "wiki.txt"
    model = model_config(family="bert")
    with pytest.raises(ValueError, match="family bert does not continue text"):
        prepare("wikitext", [path], BYTES, model, 4, True)
    with pytest.raises(ValueError, match="needs one file, and .*wiki.txt .*wiki.txt is given"):
        prepare("wikitext", [path, path], BYTES, model_config(), 4, True)
