"""How the tasks are put as text, and which texts a model is trained on and asked about."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.apps.tasks.config import TaskConfig
from megatron.apps.tasks.fine_tuning.command import as_text, with_head
from megatron.apps.tasks.fine_tuning.examples import TABLES, LabelledExample, RaceQuestion
from megatron.apps.tasks.fine_tuning.text_to_text import NUMBERS, PROMPTS, TextTable, number_word
from megatron.config import ConfigError
from megatron.families import family_of
from megatron.features.tokenizers.byte_level import ByteLevelTokenizer
from megatron.features.tokenizers.wordpiece import WordPieceTokenizer

ROWS = {
    "MNLI": ({"premise": "A man ran", "hypothesis": "He moved"}, 0, ("entailment", 1)),
    "QQP": ({"question1": "Who?", "question2": "Which one?"}, 1, ("1", 1)),
    "QNLI": ({"question": "Who?", "sentence": "He ran."}, 0, ("entailment", 0)),
    "SST-2": ({"sentence": "so good"}, 1, ("1", 1)),
    "CoLA": ({"sentence": "they ran"}, 0, ("0", 0)),
    "MRPC": ({"sentence1": "He ran.", "sentence2": "Ran he"}, 1, ("1", 1)),
    "RTE": ({"sentence1": "He ran.", "sentence2": "He moved."}, 1, ("not_entailment", 1)),
}


@pytest.mark.parametrize("name", PROMPTS["decoder"])
def test_every_label_has_a_word(name):
    table = TABLES[name]
    for way in ("decoder", "encoder"):
        prompt = PROMPTS[way][name]
        assert set(prompt.answers) == set(table.labels or NUMBERS)
        assert len(set(prompt.answers.values())) == len(prompt.answers)
        text = prompt.of(["first one", "second one"][: table.texts])
        assert "first one" in text and ("second one" in text) == (table.texts == 2)
    assert PROMPTS["decoder"].keys() == PROMPTS["encoder"].keys() == TABLES.keys()


@pytest.mark.parametrize("name", ROWS)
def test_prompts_of_lm_evaluation_harness(name):
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval")
    from pathlib import Path

    import jinja2
    import yaml

    folder = Path(lm_eval.__file__).parent / "tasks" / "glue" / name.lower().replace("-", "")

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: ("function", node.value))
    content = yaml.load((folder / "default.yaml").read_text(), Loader)
    row, number, (label, _) = ROWS[name]
    if isinstance(content["doc_to_text"], tuple):
        found = {}
        exec((folder / "utils.py").read_text(), found)
        wanted = found["doc_to_text"](row)
    else:
        wanted = jinja2.Template(content["doc_to_text"]).render(**row)
    prompt = PROMPTS["decoder"][name]
    assert prompt.of(list(row.values())) == wanted
    assert prompt.answers[label] == content["doc_to_choice"][number]


def prepared(tokenizer, length):
    model = SimpleNamespace(
        seq_length=length, decoder_seq_length=8, positions=SimpleNamespace(longest=None)
    )
    return SimpleNamespace(config=SimpleNamespace(model=model), tokenizer=tokenizer)


def test_what_is_trained_and_scored():
    task = as_text(TaskConfig(task="QQP"), family_of("gpt"))
    run = prepared(ByteLevelTokenizer(0, {"eos": 256}), 400)
    rows = [LabelledExample(("a b", "c"), 1, "x"), LabelledExample(("d", "e"), 0, "y")]
    held_out = task.held_out_samples(rows, run)
    said = [run.tokenizer.detokenize(t.continuation.tolist()) for t in held_out.samples]
    assert said == [" no", " yes", " no", " yes"]
    asked = [run.tokenizer.detokenize(t.context.tolist()) for t in held_out.samples]
    assert asked[0] == asked[1] == PROMPTS["decoder"]["QQP"].of(("a b", "c")) != asked[2]
    trained = [held_out.training[n] for n in range(2)]
    assert [t.continuation.tolist() for t in trained] == [
        held_out.samples[n].continuation.tolist() for n in (1, 2)
    ]
    numbers = {"log_prob": np.array([-3.0, -1.0, -2.0, -2.5])}
    assert [p.predicted for p in held_out.predictions(numbers)] == ["1", "0"]
    unlabelled = [dataclasses.replace(rows[0], label=None)]
    assert task.held_out_samples(unlabelled, run).training is None
    with pytest.raises(ConfigError, match="x has no label"):
        task.training_samples(unlabelled, run)


def test_what_does_not_fit():
    """A model that continues text loses the beginning of the prompt, and nothing of the answer."""
    family, tokenizer = family_of("gpt"), ByteLevelTokenizer(0, {"eos": 256})
    model = SimpleNamespace(seq_length=8)
    text = family.answered(model, tokenizer, "a long prompt", "yes")
    assert tokenizer.detokenize(text.context.tolist()) == "rompt"
    assert tokenizer.detokenize(text.continuation.tolist()) == " yes"
    with pytest.raises(ValueError, match="the answer 'yes, indeed' has 12 tokens.*reads 8"):
        family.answered(model, tokenizer, "a", "yes, indeed")


def vocabulary(*words):
    tokens = "[PAD] [UNK] [CLS] [SEP] [MASK] [BOS] [EOS]".split() + list(words)
    return WordPieceTokenizer({token: i for i, token in enumerate(tokens)}, True)


def test_answers_of_an_encoder_and_decoder():
    """Both end with the end-of-sequence token; of a long prompt the end is left out."""
    family, tokenizer = family_of("t5"), vocabulary("so", "good", "bad", "negative", "positive")
    model = SimpleNamespace(seq_length=3, decoder_seq_length=2)
    text = family.answered(model, tokenizer, "so good bad", "positive")
    assert tokenizer.detokenize(text.context.tolist()) == "so good [EOS]"
    assert tokenizer.detokenize(text.continuation.tolist()) == "positive [EOS]"
    with pytest.raises(ValueError, match="--decoder-seq-length"):
        family.answered(model, tokenizer, "so", "so good")


def test_labels_that_the_vocabulary_lacks():
    task = TextTable(TABLES["SST-2"], family_of("t5"))
    rows = [LabelledExample(("so good",), 1, "1")]
    task.held_out_samples(rows, prepared(vocabulary("so", "negative", "positive"), 16))
    with pytest.raises(ConfigError, match="'negative' and 'positive' are the same tokens"):
        task.training_samples(rows, prepared(vocabulary("so"), 16))


def test_numbers():
    task = TextTable(TABLES["STS-B"], family_of("gpt"))
    assert (number_word(3.75), number_word(0.0), number_word(5)) == ("3.8", "0.0", "5.0")
    asked = task.asked(LabelledExample(("a", "b"), 2.5, "1"))
    assert asked.answers[asked.right] == "2.4" and len(asked.answers) == 26
    scores = np.full((1, 26), -9.0)
    scores[0, 7] = -1
    (found,) = task.predictions([LabelledExample(("a", "b"), 2.5, "1")], scores)
    assert (found.predicted, found.label) == (1.4, 2.5)


def test_race():
    task = as_text(TaskConfig(task="RACE"), family_of("gpt"))
    question = RaceQuestion(
        "It rained.", "What happened?", ("sun", "rain", "snow", "fog"), 1, "1:0"
    )
    asked = task.asked(question)
    assert asked.prompt == "Article: It rained.\n\nQuestion: What happened?\nAnswer:"
    assert asked.answers[asked.right] == "rain"
    (found,) = task.predictions([question], np.array([[-5.0, -1.0, -2.0, -3.0]]))
    assert (found.predicted, found.label) == ("B", "B")


def test_which_way_a_task_is_put():
    assert with_head(TaskConfig(task="SQUAD")).settings()["head"].value == "span"
    with pytest.raises(ConfigError, match="--task SQUAD: models of the family gpt have no span"):
        as_text(TaskConfig(task="SQUAD"), family_of("gpt"))
