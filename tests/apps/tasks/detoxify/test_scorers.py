"""Classifiers, commands and functions as scorers, and what they may say."""

import numpy as np
import pytest
from detoxifying.scorers import Scorer, ScorerConfig, ScorerError, open_scorer

from megatron.config import ConfigError

TEXTS = ["What a day!", "Two\nlines!!", ""]


def lengths(texts):
    return np.array([len(text) / 100 for text in texts])


def attributes(texts):
    return [{"toxicity": 0.25, "threat": np.float32(0.5)} for _ in texts]


def fails(texts):
    raise RuntimeError("no weights")


def test_command(loud):
    scorer = open_scorer(ScorerConfig(scorer_command=loud))
    assert scorer(TEXTS) == [{"toxicity": 0.1}, {"toxicity": 0.2}, {"toxicity": 0.0}]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("false", "--scorer-command false failed with exit status 1: no message"),
        ("sh -c 'cat >/dev/null; echo broken >&2; exit 3'", "exit status 3: broken"),
        ("sh -c 'cat >/dev/null; echo loading'", "printed 'loading' in line 1, not a number"),
        ("head -n 2 /dev/null", "gave 0 scores for 3 texts"),
        ("sed 's/.*/1.5/'", "gave 1.5 for 'What a day!': a score is a number from 0 to 1"),
        ("sed 's/.*/NaN/'", "gave nan for"),
        ("sed 's/.*/true/'", "gave True for"),
        ("""sed 's/.*/{"threat": 0.5}/'""", "toxicity"),
        ("no-such-program", "--scorer-command no-such-program does not start"),
        (" ", "--scorer-command is empty"),
    ],
)
def test_commands_that_score_nothing(command, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        open_scorer(ScorerConfig(scorer_command=command))(TEXTS)


def test_a_scorer_for_all_commands(monkeypatch):
    monkeypatch.setenv("DETOXIFY_SCORER", f"{__name__}:lengths")
    assert open_scorer(ScorerConfig())(TEXTS)[0] == {"toxicity": 0.11}
    assert open_scorer(ScorerConfig(f"{__name__}:attributes"))(TEXTS)[0]["threat"] == 0.5
    monkeypatch.delenv("DETOXIFY_SCORER")
    with pytest.raises(ConfigError, match="--scorer perspective needs a key"):
        open_scorer(ScorerConfig())


def test_function():
    assert open_scorer(ScorerConfig(f"{__name__}:lengths"))(TEXTS)[0] == {"toxicity": 0.11}
    found = open_scorer(ScorerConfig(f"{__name__}:attributes"))(TEXTS)
    assert found == [{"toxicity": 0.25, "threat": 0.5}] * 3
    with pytest.raises(ScorerError, match=":fails failed: RuntimeError: no weights"):
        open_scorer(ScorerConfig(f"{__name__}:fails"))(TEXTS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scorer": "profanity"}, "--scorer profanity: perspective, profanity-check or MODULE"),
        ({"scorer": "no_module:f"}, "--scorer no_module:f cannot be imported: No module named"),
        ({"scorer": "json:none"}, "--scorer json:none cannot be imported"),
        ({"scorer": "json:dumps", "scorer_command": "cat"}, "give one of them"),
    ],
)
def test_scorers_that_do_not_exist(changes, said):
    with pytest.raises(ConfigError, match=said):
        open_scorer(ScorerConfig(**changes))


def test_fewer_scores_than_texts():
    with pytest.raises(ScorerError, match="short gave 2 scores for 3 texts"):
        Scorer("short", lambda texts: [0.5] * 2, 10)(TEXTS)


@pytest.mark.proof  # importing scikit-learn takes seconds
def test_profanity():
    pytest.importorskip("profanity_check", reason="needs alt-profanity-check (extra detoxify)")
    bad, good = open_scorer(ScorerConfig("profanity-check"))(["You idiot!", "A nice day."])
    assert bad["toxicity"] > 0.9 and good["toxicity"] < 0.1
