"""Sentence splitting."""

import random
import time

import pytest

from megatron.config import ConfigError
from megatron.features.raw_text.encoder import available_splitter, build_splitter, rule_spans


def split(text: str, lang: str = "english", keep_newlines: bool = False) -> list[str]:
    return build_splitter("rules", lang, keep_newlines)(text)


@pytest.mark.parametrize(
    "sentences",
    [
        ["Hello there.", "How are you?", "Fine!", "Bye"],
        ["Dr. Smith met J. S. Bach at 3.15 p.m. in Leipzig.", "They talked."],
        ["He said “Stop.”", "“Why?” she asked.", "(Nobody knew.)", "Then it was over..."],
        ["Version 2.0 is out... and works.", "See e.g. www.example.com for more.", "¿Qué?"],
        ["Was it I.", "Then yes."],
        ["彼は来た。", "「本当ですか？」", "はい！"],
        ["Wait!?", "No…", "Yes."],
    ],
    ids=lambda sentences: sentences[0][:12],
)
def test_rules(sentences):
    space = "" if sentences[0][0] == "彼" else " "
    assert split(space.join(sentences)) == sentences


def test_empty_lines_end_a_sentence_and_single_ones_do_not():
    assert split("A title\n\nIt is\nlong. End\n \n") == ["A title", "It is\nlong.", "End"]


def test_language():
    assert split("Das ist z.B. Hr. Meier. Gut.", "german") == ["Das ist z.B. Hr. Meier.", "Gut."]
    assert len(split("Das ist z.B. Hr. Meier. Gut.", "english")) == 4


def test_keep_newlines():
    text = " One.\nTwo. Three.\n \n\nFour.\n"
    assert split(text) == ["One.", "Two.", "Three.", "Four."]
    assert split(text, keep_newlines=True) == ["One.\n", "Two.", "Three.\n\n\n", "Four."]


def test_nothing_but_white_space_is_lost():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices(".!?…。\"')” \n\tabAB1é中I", k=rng.randrange(40)))
        spans = list(rule_spans(text, frozenset(["ab"])))
        kept = "".join(text[a:b] for a, b in spans)
        assert "".join(kept.split()) == "".join(text.split())
        assert all(text[a:b].strip() == text[a:b] != "" for a, b in spans)


@pytest.mark.parametrize("unit", [".", " ", "\n", "a. ", '."', "。", " \n", "a\n"])
def test_time_is_linear(unit):
    start = time.process_time()
    split(unit * (400_000 // len(unit)) + "x")
    assert time.process_time() - start < 4


# punkt, over a model of our own in the layout of NLTK's data


@pytest.fixture
def punkt_data(tmp_path, monkeypatch):
    nltk = pytest.importorskip("nltk", reason="nltk is optional")
    folder = tmp_path / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (folder / name).write_text("")
    (folder / "abbrev_types.txt").write_text("approx\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])


def test_punkt(punkt_data):
    assert available_splitter("english") == "punkt"
    text = "It is approx. 3 km.\nThat is far. Yes"
    wanted = ["It is approx. 3 km.", "That is far.", "Yes"]
    assert build_splitter("punkt", "english", False)(text) == wanted
    wanted[0] += "\n"
    assert build_splitter("punkt", "english", True)(text) == wanted


def test_punkt_without_its_data(punkt_data):
    assert available_splitter("klingon") == "rules"
    with pytest.raises(ConfigError, match="--sentence-splitter punkt needs .* --lang klingon"):
        build_splitter("punkt", "klingon", False)
