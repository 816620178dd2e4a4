"""Exact match and F1 against the definitions of SQuAD's official scripts, written out plainly."""

import random
import re
import string

import pytest
from squad_files import WORDS

from megatron.tasks.fine_tuning.squad.metrics import squad2_metrics, squad_metrics
from megatron.tasks.fine_tuning.squad.questions import Answer, Question


def words_of(text):
    """Official normalization, one character and one word at a time."""
    kept = ""
    for character in text.lower():
        if character not in string.punctuation:
            kept += character
    # Articles are words to a regular expression: of letters, digits and _ of any script.
    parts = re.split(r"(\w+)", kept)
    return "".join(" " if part in ("a", "an", "the") else part for part in parts).split()


def f1_of(gold, predicted, empty_agrees):
    gold, predicted = words_of(gold), words_of(predicted)
    if empty_agrees and (not gold or not predicted):
        return float(gold == predicted)
    remaining, same = list(gold), 0
    for word in predicted:
        if word in remaining:
            remaining.remove(word)
            same += 1
    if not same:
        return 0.0
    p, r = same / len(predicted), same / len(gold)
    return 2 * p * r / (p + r)


def random_text(rng):
    extra = ["A", "the", "An", "THE", "a-b", "_a_", "'", "", "x\u00a0y", "a.", "1,000"]
    return " ".join(rng.choice(WORDS + extra) for _ in range(rng.randrange(5)))


def random_case(seed, negative):
    rng = random.Random(seed)
    questions, predictions, odds = [], {}, {}
    for n in range(60):
        texts = [random_text(rng) or "x" for _ in range(rng.randint(1, 3))]
        if negative and rng.random() < 0.4:
            texts = []
        questions.append(Question(str(n), "?", "", tuple(Answer(t, 0) for t in texts)))
        options = [random_text(rng), *texts, *(t.upper() + "!" for t in texts)]
        predictions[str(n)] = "" if negative and rng.random() < 0.3 else rng.choice(options)
        odds[str(n)] = rng.choice([rng.gauss(0, 3), -1.0])
    return questions, predictions, odds


@pytest.mark.parametrize("seed", range(5))
def test_version_1_1(seed):
    questions, predictions, _ = random_case(seed, False)
    exact = f1 = 0.0
    for question in questions:
        said, golds = predictions[question.identity], [a.text for a in question.answers]
        exact += any(words_of(said) == words_of(gold) for gold in golds)
        f1 += max(f1_of(gold, said, False) for gold in golds)
    found = squad_metrics(questions, predictions)
    assert found == {"exact_match": 100 * exact / 60, "f1": pytest.approx(100 * f1 / 60, rel=1e-13)}
    assert 0 < exact < 60


@pytest.mark.parametrize("seed", range(5))
def test_version_2_0(seed):
    questions, predictions, odds = random_case(seed, True)
    exact, f1 = {}, {}
    for q in questions:
        said = predictions[q.identity]
        golds = [a.text for a in q.answers if words_of(a.text)] or [""]
        exact[q.identity] = float(any(words_of(said) == words_of(gold) for gold in golds))
        f1[q.identity] = max(f1_of(gold, said, True) for gold in golds)
    found = squad2_metrics(questions, predictions, odds)
    for prefix, chosen in (
        ("", questions),
        ("HasAns_", [q for q in questions if q.answers]),
        ("NoAns_", [q for q in questions if not q.answers]),
    ):
        assert found[f"{prefix}total"] == len(chosen) > 0
        for name, scores in (("exact", exact), ("f1", f1)):
            mean = 100 * sum(scores[q.identity] for q in chosen) / len(chosen)
            assert found[f"{prefix}{name}"] == pytest.approx(mean, rel=1e-13)
    # The best threshold, tried one after the other; equal odds are one threshold.
    for name, scores in (("exact", exact), ("f1", f1)):
        means = {}
        for threshold in [float("-inf"), *odds.values()]:
            total = 0.0
            for q in questions:
                kept = odds[q.identity] <= threshold
                if q.answers:
                    total += scores[q.identity] if kept else 0.0
                else:
                    total += 0.0 if kept and predictions[q.identity] else 1.0
            means[threshold] = 100 * total / len(questions)
        # Between questions of equal odds the script may stop too: that can only be better.
        assert max(means.values()) - 1e-9 <= found[f"best_{name}"] <= 100
    assert found["best_exact_thresh"] in {0.0, *odds.values()}
    assert set(squad2_metrics(questions, predictions)) < set(found)


def test_what_normalization_removes():
    def scores(gold, said):
        questions = [Question("q", "?", "", (Answer(gold, 0),))]
        one = squad_metrics(questions, {"q": said})
        two = squad2_metrics(questions, {"q": said})
        assert one["exact_match"] == two["exact"] or not words_of(gold)
        return one["exact_match"], one["f1"], two["f1"]

    assert scores("The  Café, (1889)!", "a café 1889") == (100, 100, 100)
    assert scores("café", "cafe") == (0, 0, 0)
    assert scores("another", "other") == (0, 0, 0)  # "an" is an article only as a word
    assert scores("twenty-one", "twentyone") == (100, 100, 100)
    assert scores("gold river north", "gold gold river") == pytest.approx((0, 200 / 3, 200 / 3))
    # Nothing is left of either: 1.1 has no word in common, 2.0 calls it no answer.
    assert scores("the", "a") == (100, 0, 100)


def test_no_answer():
    questions = [Question("a", "?", "", ()), Question("b", "?", "", (Answer("gold", 0),))]
    found = squad2_metrics(questions, {"a": "", "b": ""})
    assert (found["NoAns_exact"], found["HasAns_exact"], found["exact"]) == (100, 0, 50)
    found = squad2_metrics(questions, {"a": "gold", "b": "gold"}, {"a": 1.0, "b": -1.0})
    assert (found["exact"], found["best_exact"], found["best_exact_thresh"]) == (50, 100, -1)
