"""WordPieceTokenizer against transformers' BERT tokenizers over the same file."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.features.tokenizers import wordpiece
from megatron.features.tokenizers.huggingface import HFTokenizer
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer
from megatron.tokenizer.plain import NullTokenizer


def references(vocab_file, tmp_path, lower_case):
    """transformers' BertTokenizer, and its own older one in Python."""
    from transformers import BertTokenizer
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    (tmp_path / "vocab.txt").write_bytes(vocab_file.read_bytes())
    fast = BertTokenizer.from_pretrained(tmp_path, do_lower_case=lower_case)
    slow = BertTokenizerLegacy(str(tmp_path / "vocab.txt"), do_lower_case=lower_case)
    return fast, slow


def assert_same(ours, reference, texts):
    wanted = reference(texts, add_special_tokens=False, verbose=False)["input_ids"]
    batch = ours.tokenize_batch(texts)
    for text, ids, want in zip(texts, batch, wanted, strict=True):
        assert ids.dtype == np.int32 and ids.tolist() == want == ours.tokenize(text), repr(text)
        assert ours.detokenize(want) == reference.decode(want)


@pytest.mark.parametrize("lower_case", [True, False])
def test_against_transformers_bert(
    wordpiece_file, tmp_path, lower_case, fuzzed_strings, python_sources
):
    ours = WordPieceTokenizer.from_file(wordpiece_file, lower_case)
    fast, slow = references(wordpiece_file, tmp_path, lower_case)
    assert_same(ours, fast, [*fuzzed_strings(1000, 1), *python_sources[:4]])
    for text in python_sources[:3]:
        assert ours.tokenize(text) == slow.convert_tokens_to_ids(slow.tokenize(text))


@pytest.fixture(scope="module")
def uncased(wordpiece_file, tmp_path_factory):
    """Ours and transformers'."""
    fast, _ = references(wordpiece_file, tmp_path_factory.mktemp("uncased"), True)
    return WordPieceTokenizer.from_file(wordpiece_file, True), fast


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_against_transformers_bert_hypothesis(uncased, text):
    ours, reference = uncased
    assert ours.tokenize(text) == reference.encode(text, add_special_tokens=False)


def test_offsets(uncased, tmp_path, fuzzed_strings):
    """Characters of tokens: those of transformers, and of the same files as a folder."""
    ours, reference = uncased
    ours.save_pretrained(tmp_path)
    folder = HFTokenizer(tmp_path)
    for text in ["Café İzmir 中文-Straße, can't", *fuzzed_strings(300, 4), ""]:
        wanted = reference(text, add_special_tokens=False, return_offsets_mapping=True)
        for tokenizer in (ours, folder):
            ids, offsets = tokenizer.tokenize_with_offsets(text)
            assert ids.tolist() == wanted["input_ids"] == ours.tokenize(text)
            assert offsets.shape == (len(ids), 2)
            assert list(map(tuple, offsets.tolist())) == wanted["offset_mapping"]


def test_a_tokenizer_without_offsets():
    with pytest.raises(ValueError, match="which characters .* use --tokenizer-type BertWordPiece"):
        NullTokenizer(10).tokenize_with_offsets("1 2")


@pytest.mark.realdata
@pytest.mark.parametrize(
    "name, lower_case, size",
    [
        pytest.param("bert-base-uncased", True, 30_522, marks=pytest.mark.proof),
        ("bert-large-cased", False, 28_996),
    ],
)
def test_against_transformers_bert_real_vocabulary(
    realdata, tmp_path, fuzzed_strings, name, lower_case, size
):
    path = realdata / "bert_wordpiece" / f"{name}-vocab.txt"
    ours = WordPieceTokenizer.from_file(path, lower_case)
    assert ours.vocab_size == size
    assert [ours.pad, ours.cls, ours.sep, ours.mask] == [0, 101, 102, 103]
    fast, slow = references(path, tmp_path, lower_case)
    real = (realdata / "wikitext2" / "wiki.valid.raw").read_text("utf-8").split("\n")[::3]
    real += (realdata / "corpora" / "wiki_demo.txt").read_text("utf-8").split("\n")
    assert_same(ours, fast, [*fuzzed_strings(2000, 2), *real])
    for text in real[:200]:
        assert ours.tokenize(text) == slow.convert_tokens_to_ids(slow.tokenize(text)), text
    assert ours.word_starts.sum() == sum(not t.startswith("##") for t in fast.get_vocab())


def test_words_that_are_kept(wordpiece_file, uncased, monkeypatch):
    """Parts between spaces are encoded once; long ones and too many are not kept."""
    monkeypatch.setattr(wordpiece, "_MOST_PARTS", 50)
    ours, reference = WordPieceTokenizer.from_file(wordpiece_file, True), uncased[1]
    kept = ours._cached._ids_of_part
    text = "a\x1cb [MASK]s a\x0bb x[SEP]y " + "long-" * 30 + " " + "q" * 101 + " caf\u00e9\u0301 "
    for _ in range(2):
        assert ours.tokenize(text) == reference.encode(text, add_special_tokens=False)
        assert sorted(kept) == sorted({*text.split(" ")} - {"long-" * 30, "q" * 101})
    for n in range(60):
        word = f"import{n}"
        assert ours.tokenize(word) == reference.encode(word, add_special_tokens=False)
    assert len(kept) < 52 and "import59" in kept


def test_special_tokens(wordpiece_file):
    ours = WordPieceTokenizer.from_file(wordpiece_file, False)
    assert [ours.pad, ours.cls, ours.sep, ours.mask] == [0, 2, 3, 4]
    assert ours.eod == ours.sep and ours.sentinels == []
    with pytest.raises(ValueError, match=r"vocab.txt has no token for the beginning of text"):
        _ = ours.bos
    assert ours.tokenize("[MASK]") == [ours.mask]


def test_extra_ids_follow_as_in_megatron(wordpiece_file):
    """Megatron appends [BOS], [EOS], then the extra ids in rising order."""
    ours = WordPieceTokenizer.from_file(wordpiece_file, False, extra_ids=3)
    assert (ours.bos, ours.eos, ours.sentinels) == (2000, 2001, [2002, 2003, 2004])
    assert (ours.vocab_size, ours.eod) == (2005, ours.eos)
    assert ours.tokenize("<extra_id_1>") == [2003]
    plain = WordPieceTokenizer.from_file(wordpiece_file, False)
    assert ours.tokenize("def main(): pass") == plain.tokenize("def main(): pass")


def test_word_starts(wordpiece_file):
    ours = WordPieceTokenizer.from_file(wordpiece_file, False, extra_ids=1)
    tokens = [*wordpiece_file.read_text().split("\n")[:-1], "[BOS]", "[EOS]", "<extra_id_0>"]
    assert ours.word_starts.tolist() == [token[:2] != "##" for token in tokens]
    text = "def unforeseeable(): import"
    ids = ours.tokenize(text)
    assert ours.word_starts[ids].sum() == len("def unforeseeable ( ) : import".split()) < len(ids)
    assert not ours.word_starts.flags.writeable


@pytest.mark.parametrize("extra_ids", [0, 5])
@pytest.mark.parametrize("lower_case", [True, False])
def test_against_auto_tokenizer_of_saved_folder(
    wordpiece_file, tmp_path, fuzzed_strings, lower_case, extra_ids
):
    from transformers import AutoTokenizer

    ours = WordPieceTokenizer.from_file(wordpiece_file, lower_case, extra_ids)
    ours.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert type(saved).__name__.startswith("BertTokenizer") and len(saved) == ours.vocab_size
    texts = [*fuzzed_strings(500, 3), "a<extra_id_3>b [EOS]"]
    assert_same(ours, saved, texts)
    assert saved("a")["input_ids"] == [ours.cls, *ours.tokenize("a"), ours.sep]
    for name in ("pad", "cls", "sep", "mask") + (("bos", "eos") if extra_ids else ()):
        assert getattr(saved, f"{name}_token_id") == getattr(ours, name)
    again = WordPieceTokenizer.from_file(tmp_path / "vocab.txt", lower_case, extra_ids)
    assert (again.vocab_size, again.sentinels) == (ours.vocab_size, ours.sentinels)


@pytest.mark.parametrize(
    "content, message",
    [
        ("[UNK]\n\na\n", "line 2 is empty"),
        ("[UNK]\na\na\n", "line 3: 'a' is already in line 2"),
        ("a\nb\n", r"lacks the token \[UNK\]"),
        (b"\xff\n", "is not UTF-8"),
    ],
)
def test_bad_vocabulary(tmp_path, content, message):
    path = tmp_path / "vocab.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"--vocab-file .*vocab.txt.* ?{message}"):
        WordPieceTokenizer.from_file(path, True)


def test_other_errors(wordpiece_file, tmp_path):
    ours = WordPieceTokenizer.from_file(wordpiece_file, True)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        ours.tokenize_batch(["a", "\ud800"])
    for i in (2000, -1):
        with pytest.raises(ValueError, match=f"token id {i} is outside .*--vocab-file"):
            ours.detokenize([5, i])
    with pytest.raises(FileNotFoundError, match="--vocab-file .*none.txt does not exist"):
        WordPieceTokenizer.from_file(tmp_path / "none.txt", True)
