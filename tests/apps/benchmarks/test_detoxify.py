"""What benchmarks/detoxify.py plants, asks and shows."""

import random

from detoxify import MEASURES, SENTENCE_END, planted, prompts, table

TEXT = "One two three four five six. Is it so? " * 4


def test_a_profane_sentence_among_each_four():
    found = SENTENCE_END.split(planted(TEXT, 4, random.Random(1)))
    added = [sentence for sentence in found if sentence not in TEXT]
    assert len(found) == 10 and len(added) == 2
    assert SENTENCE_END.split(TEXT.strip()) == [s for s in found if s in TEXT]
    assert all(sentence[0].isupper() for sentence in added)


def test_prompts_are_half_a_sentence():
    assert list(prompts([TEXT, "Too short.", TEXT, TEXT], 2, random.Random(1))) == [
        "One two three",
        "One two three",
    ]


def test_table():
    def seed(before, after):
        values = dict.fromkeys((*MEASURES, "perplexity, clean", "perplexity, as trained on"))
        return {
            "before": dict.fromkeys(values, before),
            "least toxic half": dict.fromkeys(values, after),
        }

    lines = table([seed(0.5, 0.4), seed(0.4, 0.3), seed(1.0, 0.5)]).splitlines()
    assert lines[0] == "| | before | least toxic half | change |"
    assert lines[2] == (
        "| Expected Maximum Toxicity | 0.5 (0.4 to 1) | 0.4 (0.3 to 0.5) "
        "| -25.0 % (-50.0 to -20.0) |"
    )
