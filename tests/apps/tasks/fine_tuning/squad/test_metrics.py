"""Exact match and F1 against the definitions of SQuAD's official scripts, written out plainly."""

import random
import re
import string

import pytest
from squad_files import WORDS

from megatron.apps.tasks.fine_tuning.squad_files import squad2_metrics, squad_metrics


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
    """Gold answers, predictions and null odds of 60 questions."""
    rng = random.Random(seed)
    golds, predicted, odds = [], [], []
    for _ in range(60):
        texts = [random_text(rng) or "x" for _ in range(rng.randint(1, 3))]
        if negative and rng.random() < 0.4:
            texts = []
        golds.append(texts)
        options = [random_text(rng), *texts, *(t.upper() + "!" for t in texts)]
        predicted.append("" if negative and rng.random() < 0.3 else rng.choice(options))
        odds.append(rng.choice([rng.gauss(0, 3), -1.0]))
    return golds, predicted, odds


@pytest.mark.parametrize("seed", range(5))
def test_version_1_1(seed):
    golds, predicted, _ = random_case(seed, False)
    exact = f1 = 0.0
    for texts, said in zip(golds, predicted, strict=True):
        exact += any(words_of(said) == words_of(gold) for gold in texts)
        f1 += max(f1_of(gold, said, False) for gold in texts)
    found = squad_metrics(golds, predicted)
    assert found == {"exact_match": 100 * exact / 60, "f1": pytest.approx(100 * f1 / 60, rel=1e-13)}
    assert 0 < exact < 60


@pytest.mark.parametrize("seed", range(5))
def test_version_2_0(seed):
    golds, predicted, odds = random_case(seed, True)
    exact, f1 = [], []
    for texts, said in zip(golds, predicted, strict=True):
        kept = [text for text in texts if words_of(text)] or [""]
        exact.append(float(any(words_of(said) == words_of(gold) for gold in kept)))
        f1.append(max(f1_of(gold, said, True) for gold in kept))
    found = squad2_metrics(golds, predicted, odds)
    for prefix, chosen in (
        ("", range(60)),
        ("HasAns_", [n for n in range(60) if golds[n]]),
        ("NoAns_", [n for n in range(60) if not golds[n]]),
    ):
        assert found[f"{prefix}total"] == len(chosen) > 0
        for name, scores in (("exact", exact), ("f1", f1)):
            mean = 100 * sum(scores[n] for n in chosen) / len(chosen)
            assert found[f"{prefix}{name}"] == pytest.approx(mean, rel=1e-13)
    # The best threshold, tried one after the other; equal odds are one threshold.
    for name, scores in (("exact", exact), ("f1", f1)):
        means = []
        for threshold in [float("-inf"), *odds]:
            total = 0.0
            for n in range(60):
                kept = odds[n] <= threshold
                silent = 0.0 if golds[n] else 1.0
                said = scores[n] if golds[n] else float(not predicted[n])
                total += said if kept else silent
            means.append(100 * total / 60)
        # Between questions of equal odds the script may stop too: that can only be better.
        assert max(means) - 1e-9 <= found[f"best_{name}"] <= 100
        assert found[f"best_{name}_thresh"] in {0.0, *odds}
    assert set(squad2_metrics(golds, predicted)) < set(found)


def test_the_best_threshold_of_different_odds():
    golds = [["gold"], [], ["fire"], [], ["river"]]
    predicted = ["gold", "bridge", "fire", "", "north"]
    found = squad2_metrics(golds, predicted, [-3.0, -2.0, -1.0, 0.5, 1.0])
    # After the first right answer comes one to a question that has none.
    assert (found["best_exact"], found["best_exact_thresh"]) == (60, -3)
    found = squad2_metrics(golds, predicted, [-3.0, 2.0, -1.0, 0.5, 1.0])
    assert (found["best_exact"], found["best_exact_thresh"]) == (80, -1)


def test_what_normalization_removes():
    def scores(gold, said):
        one, two = squad_metrics([[gold]], [said]), squad2_metrics([[gold]], [said])
        assert one["exact_match"] == two["exact"]
        return one["exact_match"], one["f1"], two["f1"]

    assert scores("The  Café, (1889)!", "a café 1889") == (100, 100, 100)
    assert scores("café", "cafe") == (0, 0, 0)
    assert scores("another", "other") == (0, 0, 0)  # "an" is an article only as a word
    assert scores("twenty-one", "twentyone") == (100, 100, 100)
    assert scores("gold river north", "gold gold river") == pytest.approx((0, 200 / 3, 200 / 3))
    # Nothing is left of either: 1.1 has no word in common, 2.0 calls it no answer.
    assert scores("the", "a") == (100, 0, 100)


def test_no_answer():
    golds = [[], ["gold"]]
    found = squad2_metrics(golds, ["", ""])
    assert (found["NoAns_exact"], found["HasAns_exact"], found["exact"]) == (100, 0, 50)
    found = squad2_metrics(golds, ["gold", "gold"], [1.0, -1.0])
    assert (found["exact"], found["best_exact"], found["best_exact_thresh"]) == (50, 100, -1)
