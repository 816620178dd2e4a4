"""Samples of public text with public vocabularies decode to the text they were made of."""

import json
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from samples import sampled

from megatron.apps.corpus.indexed_writer import IndexedDatasetWriter
from megatron.data.index_cache import IndexCache
from megatron.data.indexed import IndexedDataset
from megatron.features.masked.bert import BertRecipe
from megatron.features.masked.flags import MaskedDataConfig
from megatron.features.masked.t5 import T5Recipe
from megatron.features.masked.tfrecord import TFRecordRecipe, TFRecords
from megatron.features.raw_text.encoder import build_splitter
from megatron.features.tokenizers.sentence_piece import SentencePieceTokenizer
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer
from megatron.tokenizer.base import Tokenizer

pytestmark = pytest.mark.realdata


def sample_text(folder: Path) -> list[list[str]]:
    """One sentence per line, an empty line between documents."""
    text = (folder / "corpora/bert_sample_text.txt").read_text()
    return [part.strip().split("\n") for part in text.split("\n\n")]


def wikitext(folder: Path) -> list[list[str]]:
    """Articles, split into sentences by rules."""
    split = build_splitter("rules", "english", keep_newlines=False)
    articles: list[list[str]] = []
    for line in (folder / "wikitext2/wiki.valid.raw").read_text().split("\n"):
        if line.startswith(" = ") and not line.startswith(" = ="):
            articles.append([])
        elif line.strip() and articles:
            articles[-1] += split(line)
    return articles[:20]


def race(folder: Path) -> list[list[str]]:
    split = build_splitter("rules", "english", keep_newlines=False)
    files = sorted((folder / "race/dev/middle").glob("*.txt"))
    return [split(json.loads(file.read_text())["article"]) for file in files]


CORPORA = {"sample_text": sample_text, "wikitext2": wikitext, "race": race}


@pytest.fixture(scope="module")
def wordpiece(realdata: Path) -> WordPieceTokenizer:
    path = realdata / "bert_wordpiece/bert-base-uncased-vocab.txt"
    return WordPieceTokenizer.from_file(path, lower_case=True, extra_ids=100)


def indexed(texts: list[list[str]], tokenizer: Tokenizer, prefix: Path) -> IndexedDataset:
    sentences = tokenizer.tokenize_batch([sentence for text in texts for sentence in text])
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        writer.add_documents(
            np.concatenate(sentences), [len(s) for s in sentences], [len(text) for text in texts]
        )
    return IndexedDataset(str(prefix))


PAIRS = ("none", "sentence-order", "next-sentence")


@pytest.mark.parametrize(
    ("corpus", "pairs"),
    sampled(product(CORPORA, PAIRS), list(zip(CORPORA, PAIRS, strict=True)).__contains__),
)
def test_bert(
    corpus: str, pairs: str, realdata: Path, wordpiece: WordPieceTokenizer, tmp_path: Path
) -> None:
    texts = CORPORA[corpus](realdata)
    documents = indexed(texts, wordpiece, tmp_path / "corpus")
    names = (realdata / "bert_wordpiece/bert-base-uncased-vocab.txt").read_text().split("\n")

    def decoded(ids: np.ndarray) -> str:
        """The words; its own decoder would depend on what is around them."""
        return " ".join(names[i] for i in ids).replace(" ##", "") + " "

    whole = [
        decoded(np.concatenate([documents.get(s) for s in range(first, last)]))
        for first, last in pairwise(documents.document_indices.tolist())
    ]
    assert all(
        word.lower() in whole[0]
        for word in texts[0][0].split()
        if word.isalpha() and word.isascii()
    )
    config = MaskedDataConfig(
        bert_pair_task="sentence-order" if pairs == "none" else pairs,
    )
    recipe = BertRecipe.from_config(config, wordpiece, 128, 1234, pairs != "none")
    dataset = recipe.build(documents, range(len(texts)), 150, "train", IndexCache(None))
    pieces = ~wordpiece.word_starts
    predicted, tokens = 0, 0
    for i in range(150):
        sample = dataset[i]
        chosen = sample.labels_S >= 0
        ids = np.where(chosen, sample.labels_S, sample.tokens_S)
        predicted, tokens = predicted + chosen.sum(), tokens + sample.padding_mask_S.sum()
        used = int(sample.padding_mask_S.sum())
        ends = np.flatnonzero(ids[:used] == wordpiece.sep)
        assert ids[0] == wordpiece.cls and ends[-1] == used - 1
        segments = [
            ids[1 : ends[0]],
            *([ids[ends[0] + 1 : used - 1]] if len(ends) > 1 else []),
        ]
        assert len(segments) == (1 if pairs == "none" else 2)
        places = []
        for segment in segments:
            body = segment[np.argmax(~pieces[segment]) :]  # a cut may leave the end of a word
            text = decoded(body).removesuffix(" ")
            found = [d for d, document in enumerate(whole) if text in document]
            assert found, text
            places.append((found, whole[found[0]].find(text)))
        if pairs == "sentence-order" and len(places[0][0]) == len(places[1][0]) == 1:
            assert places[0][0] == places[1][0]
            assert (places[0][1] > places[1][1]) == sample.is_random
        if pairs == "next-sentence" and not sample.is_random:
            assert set(places[0][0]) & set(places[1][0])
        for position in np.flatnonzero(pieces[ids[:used]]):
            if ids[position - 1] not in (wordpiece.cls, wordpiece.sep):
                assert chosen[position] == chosen[position - 1]
    assert abs(predicted / tokens - 0.15) < 0.01


@pytest.mark.parametrize("corpus", CORPORA)
def test_t5(corpus: str, realdata: Path, wordpiece: WordPieceTokenizer, tmp_path: Path) -> None:
    texts = CORPORA[corpus](realdata)
    documents = indexed(texts, wordpiece, tmp_path / "corpus")
    whole = [[int(i) for s in text for i in wordpiece.tokenize(s)] for text in texts]
    recipe = T5Recipe.from_config(MaskedDataConfig(), wordpiece, (128, None), 1234)
    dataset = recipe.build(documents, range(len(texts)), 100, "train", IndexCache(None))
    for i in range(100):
        sample = dataset[i]
        spans: dict[int, list[int]] = {}
        for token in sample.labels_D[sample.loss_mask_D == 1][:-1].tolist():
            if token in wordpiece.sentinels:
                spans[token] = []
            else:
                spans[next(reversed(spans))].append(token)
        text: list[int] = []
        for token in sample.encoder_tokens_E[sample.encoder_padding_mask_E == 1][:-1].tolist():
            text += spans.pop(token, [token])
        assert not spans
        assert any(
            text == document[start : start + len(text)]
            for document in whole
            for start in range(len(document) - len(text) + 1)
            if document[start] == text[0]
        )


def test_tfrecords_of_tensorflow(realdata: Path, wordpiece: WordPieceTokenizer) -> None:
    """60 records that create_pretraining_data.py made of the sample text."""
    path = str(realdata / "tfrecord/tf_examples.tfrecord")
    records = TFRecords(path, IndexCache(None))
    assert len(records) == 60
    recipe = TFRecordRecipe(128, 1, wordpiece.pad, wordpiece.vocab_size)
    dataset = recipe.build(records, range(60), 60, "train", IndexCache(None))
    documents = [
        [int(i) for sentence in text for i in wordpiece.tokenize(sentence)]
        for text in sample_text(realdata)
    ]

    def places(segment: np.ndarray) -> list[tuple[int, int]]:
        wanted, size = segment.tolist(), len(segment)
        return [
            (d, start)
            for d, document in enumerate(documents)
            for start in range(len(document) - size + 1)
            if document[start : start + size] == wanted
        ]

    random, masked, predicted = 0, 0, 0
    for i in range(60):
        sample = dataset[i]
        chosen = sample.loss_mask_S == 1
        ids = np.where(chosen, sample.labels_S, sample.tokens_S)[: sample.padding_mask_S.sum()]
        ends = np.flatnonzero(ids == wordpiece.sep)
        assert ids[0] == wordpiece.cls and len(ends) == 2 and ends[1] == len(ids) - 1
        assert sample.types_S[: len(ids)].tolist() == [0] * (ends[0] + 1) + [1] * int(
            ends[1] - ends[0]
        )
        first, second = places(ids[1 : ends[0]]), places(ids[ends[0] + 1 : -1])
        assert first and second
        together = {d for d, _ in first} & {d for d, _ in second}
        if not sample.is_random:
            assert together  # and A lies before B
            assert any(a < b for d, a in first for e, b in second if d == e)
        random += sample.is_random
        predicted += int(chosen.sum())
        masked += int((sample.tokens_S[chosen] == wordpiece.mask).sum())
    assert 15 < random < 50
    assert abs(masked / predicted - 0.8) < 0.05


def test_t5_with_its_own_vocabulary(realdata: Path, tmp_path: Path) -> None:
    """Not split into sentences; decoded with sentencepiece itself."""
    model = str(realdata / "tokenizers_sp/t5_spiece.model")
    tokenizer = SentencePieceTokenizer.from_file(model, extra_ids=100)
    texts = [" ".join(text) for text in race(realdata)[:40]]
    documents = indexed([[text] for text in texts], tokenizer, tmp_path / "corpus")
    recipe = T5Recipe.from_config(MaskedDataConfig(short_seq_prob=0.0), tokenizer, (64, None), 1)
    assert (recipe.end, recipe.pad) == (1, 0)
    dataset = recipe.build(documents, range(len(texts)), 100, "train", IndexCache(None))
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    plain = [" ".join(text.split()) for text in texts]
    for i in range(100):
        sample = dataset[i]
        labels = sample.labels_D[sample.loss_mask_D == 1].tolist()
        encoder = sample.encoder_tokens_E[sample.encoder_padding_mask_E == 1].tolist()
        assert labels.pop() == encoder.pop() == processor.eos_id()
        text: list[int] = []
        for token in encoder:
            if token in tokenizer.sentinels:
                start = labels.index(token) + 1
                stop = next(
                    (n for n in range(start, len(labels)) if labels[n] in tokenizer.sentinels),
                    len(labels),
                )
                text += labels[start:stop]
            else:
                text.append(token)
        decoded = processor.decode(text)
        assert len(text) <= recipe.rules.max_tokens
        if processor.unk_id() not in text:
            assert any(decoded in document for document in plain), decoded
