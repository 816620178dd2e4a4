"""RULER's documents against those of lm-eval's generators, made of the same keys, values and
places; lengths, depths and seeds."""

import random
import re
import sys
from collections import Counter
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from megatron.apps.tasks.length.config import LengthConfig
from megatron.apps.tasks.length.haystacks import (
    ADJECTIVES,
    NOISE,
    NOUNS,
    VERBS,
    essay_of_file,
    essay_of_words,
    split_sentences,
    woven,
)
from megatron.apps.tasks.length.ruler import (
    TASKS,
    cwe_prompt,
    fwe_prompt,
    fwe_words,
    niah_prompt,
    vt_context,
    vt_prompt,
)
from megatron.apps.tasks.length.tasks import LengthPlan, contained_share, mean_of_present
from megatron.config import ConfigError

NEEDLE = re.compile(r"One of the special magic \w+ for \S+ is: [-\w]+\.")
ESSAY = [word for sentence in essay_of_words().sentences(400) for word in sentence.split()]


@pytest.fixture(scope="module")
def ruler():
    """lm-eval's generators. The word list that they draw from and NLTK's data are not installed."""
    import nltk  # two seconds, which only the process that runs these tests spends

    words = ModuleType("wonderwords")
    lists = {"nouns": NOUNS, "adjectives": ADJECTIVES, "verbs": VERBS}
    lists |= {"noun": NOUNS, "adjective": ADJECTIVES, "verb": VERBS}
    words.RandomWord = lambda: SimpleNamespace(_categories=lists)
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, "wonderwords", words)
    patch.setattr(nltk.data, "find", lambda name: name)
    from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, prepare_niah, vt_utils

    patch.setattr(prepare_niah, "cached_sent_tokenize", split_sentences)
    yield SimpleNamespace(
        common=common_utils, cwe=cwe_utils, fwe=fwe_utils, niah=prepare_niah, vt=vt_utils
    )
    patch.undo()


def split_at_spaces(text):
    return SimpleNamespace(input_ids=text.split())


NIAH = {
    "niah_single_1": ("repeat", {}),
    "niah_single_2": ("essay", {}),
    "niah_single_3": ("essay", {"type_needle_v": "uuids"}),
    "niah_multikey_1": ("essay", {"num_needle_k": 4}),
    "niah_multikey_2": ("needle", {}),
    "niah_multikey_3": ("needle", {"type_needle_k": "uuids", "type_needle_v": "uuids"}),
    "niah_multivalue": ("essay", {"num_needle_v": 4}),
    "niah_multiquery": ("essay", {"num_needle_q": 4}),
}


def sampled(names, kept):
    return [n if n in kept else pytest.param(n, marks=pytest.mark.proof) for n in names]


@pytest.mark.parametrize("name", sampled(NIAH, ("niah_single_1", "niah_multiquery")))
def test_prompts_of_needles_against_lm_eval(ruler, name, monkeypatch):
    """The needles are parsed from lm-eval's context, and put back at their places."""
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE

    haystack, changes = NIAH[name]
    text = {"essay": ESSAY, "repeat": NOISE, "needle": ruler.niah.NEEDLE}[haystack]
    kinds = {"type_needle_k": "words", "type_needle_v": "numbers"} | changes
    monkeypatch.setattr(ruler.niah, "tqdm", lambda values, desc: values)
    random.seed(5)
    (theirs,) = ruler.niah.generate_samples(
        text, split_at_spaces, max_seq_length=600, template=TEMPLATE, type_haystack=haystack,
        num_samples=1, **kinds,
    )  # fmt: skip
    before, *lines, question = theirs["input"].split("\n")
    keys = re.search(r" for (\S.*) mentioned", question)[1].replace(", and ", ", ").split(", ")
    single = len(theirs["outputs"]) == 1
    if haystack == "essay":
        joint, (line,) = " ", lines
        parts = re.split(f"({NEEDLE.pattern})", line)
        lines = [s for p in parts for s in ([p] if NEEDLE.fullmatch(p) else split_sentences(p))]
    else:
        joint = "\n"
    if haystack == "needle":
        asked = [n for n, line in enumerate(lines) if f" {keys[0]} is" in line]
    else:
        asked = [n for n, line in enumerate(lines) if NEEDLE.fullmatch(line)]
    hay = [line for n, line in enumerate(lines) if n not in asked]
    places = [(at - turn) / len(hay) for turn, at in enumerate(asked)]
    context = joint.join(woven(hay, [lines[n] for n in asked], places))
    prompt, prefix = niah_prompt(kinds["type_needle_v"][:-1], context, keys, single)
    # Without sentences before a needle lm-eval has a space for them.
    assert prompt == re.sub(" +", " ", theirs["input"].replace("\n ", "\n").replace(" \n", "\n"))
    assert prefix == theirs["gen_prefix"]
    assert before.endswith("afterwards.")


def test_variable_tracking_against_lm_eval(ruler):
    random.seed(3)
    np.random.seed(3)
    theirs, variables = ruler.vt.generate_input_output(20, 1, 4)
    value = re.search(r"assigned the value (\d+)", theirs)[1]
    random.seed(3)
    names = ["".join(random.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(5)]
    assert names == variables
    places = sorted(random.sample(range(20), 5))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {b} = VAR {a} " for a, b in zip(names, names[1:], strict=False)]
    prompt, prefix = vt_prompt(vt_context([NOISE + "\n"] * 20, chain, places), value, 5)
    assert f"{prompt} {prefix} " == theirs


def test_words_of_lists_against_lm_eval(ruler):
    _, theirs, common = ruler.cwe.generate_input_output(60, 4096)
    words = re.findall(r"\d+\. (\S+)", theirs)
    prompt, prefix = cwe_prompt(words)
    assert f"{prompt} {prefix}" == theirs
    ((_, ours),) = documents("ruler_cwe", [4096], 1)
    listed = re.findall(r"\d+\. (\S+)", ours.prompt.rpartition("Below is")[2])
    for counted, answers in ((Counter(words), common), (Counter(listed), ours.answers)):
        assert {word for word, count in counted.items() if count == 30} == set(answers)
        assert set(counted.values()) == {30, 3}
    example, _, answer = ours.prompt.partition("\nBelow is")[0].partition("\nQuestion")
    shown = Counter(re.findall(r"\d+\. (\S+)", example))
    often = {word for word, count in shown.items() if count == 10}
    assert set(re.findall(r"\d+\. (\S+)", answer)) == often and len(often) == 10


def test_coded_words_against_lm_eval(ruler):
    theirs, answers, count = ruler.fwe.generate_input_output(
        2000, split_at_spaces, num_words=900, vocab_size=80
    )
    words = re.search(r"coded words\. (.*)\nQuestion", theirs)[1].split()
    prompt, prefix = fwe_prompt(words)
    assert f"{prompt} {prefix}" == theirs and count == 900
    ranked = [word for word, _ in Counter(words).most_common()]
    assert Counter(fwe_words(ranked, 900)) == Counter(words)
    assert ranked[1:4] == answers


def test_score_against_lm_eval(ruler):
    draw = random.Random(1)
    for _ in range(20):
        answers = [str(draw.randrange(100)) for _ in range(4)]
        text = " ".join(str(draw.randrange(100)) for _ in range(40))
        assert contained_share(text, answers) == ruler.common.string_match_all([text], [answers])
    assert contained_share("BLUE", ["blue", "red"]) == 0.5
    values = [-1.0, 1.0, -1.0, 0.5]
    assert mean_of_present(values) == ruler.common.aggregate_metrics(values) == 0.75


def documents(name, lengths, count, depths=(0.5,), seed=7):
    return TASKS[name].documents(
        name, lengths, depths, count, essay_of_words(), lambda text: len(text.split()), seed
    )


@pytest.mark.parametrize("name", sampled(TASKS, ("niah_multikey_2", "ruler_vt", "passkey")))
def test_documents_fill_their_length_and_have_their_answers(name):
    lengths, depths = [500, 1200], [0.0, 0.5, 1.0]
    found = documents(name, lengths, 6, depths)
    assert found == documents(name, lengths, 6, depths)
    assert found[:3] == documents(name, lengths, 3, depths)
    assert found != documents(name, lengths, 6, depths, seed=8)
    assert [length for length, _ in found] == lengths * 3
    for number, (length, document) in enumerate(found):
        total = len(document.request.split()) + TASKS[name].new_tokens
        assert 0.9 * length < total <= length
        assert all(answer in document.prompt for answer in document.answers)
        assert len(set(document.answers)) == len(document.answers)
        if TASKS[name].has_depth:
            assert document.depth == depths[number // 2]
            place = document.prompt.index(document.answers[0]) / len(document.prompt)
            assert abs(place - document.depth) < 0.2
        if name == "passkey":
            assert len({*document.wrong, *document.answers}) == 100


def test_a_length_without_room_is_named():
    with pytest.raises(ConfigError, match="--lengths 100 has no room for a document of ruler_vt"):
        documents("ruler_vt", [100], 1)


def test_lengths_and_depths():
    assert LengthConfig(lengths="8k,4096,128K").numbers == [4096, 8192, 131072]
    assert LengthConfig().of_model(20000) == [4096, 8192, 16384]
    assert LengthConfig().of_model(1024) == [1024]
    assert LengthConfig(depths="0,12.5").shares == [0, 0.125]
    for words, said in (
        ({"lengths": "4m"}, "as 4096,8192 or 4k,8k"),
        ({"depths": "120"}, "expected percents"),
        ({"lengths": "8k"}, "is longer than the 4096 tokens"),
    ):
        with pytest.raises(ConfigError, match=said):
            config = LengthConfig(**words)
            config.shares, config.of_model(4096)  # noqa: B018


def test_names_and_files_of_tasks(tmp_path):
    plan = LengthPlan.of(["passkey", "hellaswag", "ruler=essays.txt"])
    assert list(plan.tasks) == ["passkey", "ruler"] and plan.others == ["hellaswag"]
    assert plan.generates and not LengthPlan.of(["loss_by_position=x"]).generates
    with pytest.raises(ConfigError, match="write loss_by_position=FILE"):
        LengthPlan.of(["loss_by_position"])
    with pytest.raises(ConfigError, match="passkey reads no file"):
        LengthPlan.of(["passkey=x"])
    file = tmp_path / "essays.txt"
    file.write_text("One sentence. Another\none!  " + "long " * 200)
    sentences = essay_of_file(file, "--tasks ruler").sentences(6)
    assert sentences[:2] == ["One sentence.", "Another one!"] and sentences[5] == "One sentence."
    assert len(sentences[2]) <= 405
    file.write_text(" ")
    with pytest.raises(ConfigError, match="has no sentences"):
        essay_of_file(file, "--tasks ruler")
