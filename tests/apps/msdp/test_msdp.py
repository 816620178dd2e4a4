"""Dialogues by prompting: files, examples, prompts, a server, F1 from its definition."""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest
import torch
from retrieval_files import internet_dialogue, wikipedia_dialogue, write_dpr

from megatron.apps.msdp.dialogues import (
    DialogueLine,
    internet_turns,
    overlap,
    read_turns,
    response_examples,
    wikipedia_turns,
    with_knowledge,
    words,
    write_lines,
)
from megatron.apps.msdp.preprocessing import knowledge_examples, question_encoder
from megatron.apps.msdp.prompting import MsdpConfig, mean_f1, prompts_of, run_msdp, word_f1
from megatron.config import ConfigError


def slow_f1(guess, answer):
    def plain(text):
        marks = "!\"#$%&()*+,-./:;<=>?@[]\\^`{|}~_'"
        text = "".join(" " if mark in marks else mark for mark in text.lower())
        return [word for word in text.split() if word not in ("a", "an", "the")]

    left, same = plain(answer), 0
    for word in plain(guess):
        if word in left:
            left.remove(word)
            same += 1
    if not same:
        return 0.0, 0.0, 0.0
    precision, recall = same / len(plain(guess)), same / len(plain(answer))
    return precision, recall, 2 * precision * recall / (precision + recall)


def test_f1_from_its_definition():
    draw = np.random.default_rng(0)
    bag = "The the a an Cat cat, cat's dog! dog-house x_y ran. it".split()
    pairs = [
        tuple(" ".join(draw.choice(bag, draw.integers(0, 9))) for _ in "ab") for _ in range(99)
    ]
    for pair in pairs:
        assert word_f1(*pair) == pytest.approx(slow_f1(*pair), abs=1e-15)
    counted = [slow_f1(*pair) for pair in pairs if pair[1]]
    assert len(counted) < 99
    found = mean_f1(*zip(*pairs, strict=True))
    assert found == pytest.approx(np.mean(counted, axis=0))


def test_evaluation_prints_the_means(tmp_path, capsys):
    guess, answer = tmp_path / "g", tmp_path / "a"
    guess.write_text("a cat<|endoftext|>\nwhatever\n")
    answer.write_text("The cat sat\nno_passages_used\n")
    flags = ["--task", "MSDP-EVAL-F1", "--guess-file", str(guess), "--answer-file", str(answer)]
    run_msdp(None, flags)
    assert "Precision: 1.0000; recall: 0.5000; f1: 0.6667" in capsys.readouterr().out
    answer.write_text("The cat sat\n")
    with pytest.raises(ConfigError, match="has 2 lines, and --answer-file .* 1"):
        run_msdp(None, flags)


def test_dialogues_of_wikipedia(tmp_path):
    file = tmp_path / "wow.json"
    dialogue = wikipedia_dialogue("Cats", "small animals that " * 30, 2)
    dialogue["dialog"][3] |= {"checked_sentence": {}, "checked_passage": {"a": "x", "b": "y"}}
    file.write_text(json.dumps([dialogue]))
    first, second = wikipedia_turns(str(file))
    assert first.topic == "Cats" and first.context == "Tell me about Cats."
    assert first.answer.startswith("I have read that Cats is small") and first.answer[-1] == "."
    assert second.knowledge == "no_passages_used" and second.topic == "Cats"
    assert second.turns == ["Tell me about Cats.", first.answer, "And what is number 0 ?"]
    file.write_text(json.dumps([{"dialog": [{"speaker": "0"}]}]))
    with pytest.raises(ConfigError, match="expected a list of dialogues of Wizard of Wikipedia"):
        wikipedia_turns(str(file))
    with pytest.raises(ConfigError, match=r"--raw_file \S*nothing cannot be read: [^(]*No such"):
        wikipedia_turns(str(tmp_path / "nothing"))


def test_dialogues_of_the_internet(tmp_path):
    file = tmp_path / "woi.jsonl"
    dialogue = internet_dialogue("Cats", "one two three four five")
    history = dialogue["dialog_history"]
    unused = {"contents": [{"content": ["no"]}], "selected_contents": [[1], [1]]}
    history += [history[0], {"action": history[3]["action"], "text": "yes", "context": unused}]
    file.write_text(json.dumps({"1": dialogue}))
    assert internet_turns(str(file)) == [
        DialogueLine(
            "Cats", "Hello there.", "one two three four five", "Well, one two three four five"
        )
    ]
    history[0] = {"action": "Nobody => Wizard", "text": ""}
    file.write_text(json.dumps({"1": dialogue}))
    with pytest.raises(ConfigError, match="line 1: expected a dialogue"):
        internet_turns(str(file))


def test_long_runs_count():
    known = set("abcdefghijklmnop")
    for answer, expected in (
        ("abcdefghi", 0), ("abcdefghij", 10), ("abcdefghijXklmnopabcdYa", 20), ("XX", 0),
    ):  # fmt: skip
        runs = re.findall("[a-p]+", answer)
        assert overlap(answer, known) == expected == sum(len(r) for r in runs if len(r) >= 10)


def test_examples_of_answers():
    knowledge = "one two three four five six seven eight nine ten eleven twelve"
    good = DialogueLine("T", "hi [SEP] who ?", knowledge, f"Yes , I know : {knowledge}")
    turns = [good._replace(topic=f"T{n}") for n in range(5)]
    turns += [good._replace(answer=knowledge), good._replace(answer="no"), good]
    turns[-1] = good._replace(knowledge="no_passages_used")
    examples = response_examples(turns, 5, seed=1)
    shown = f"User says: who ? We know that: {knowledge} System replies: {turns[0].answer}"
    assert sorted(examples) == [f"Topic: T{n}. {shown}" for n in range(5)]
    assert examples == response_examples(turns, 5, seed=1) != response_examples(turns, 5, seed=2)
    with pytest.raises(ConfigError, match="has 5 answers .* 6 examples"):
        response_examples(turns, 6, seed=1)


def test_examples_of_knowledge_by_similarity():
    train = [DialogueLine(f"T{n % 3}", f"w{n}", f"T{n % 3} is {n}", "a") for n in range(12)]
    train += [DialogueLine("T0", "x", "T0 ( is", "a"), DialogueLine("Z", "x", "It is Z", "a")]
    test = [DialogueLine("T1", "old [SEP] w4", "", ""), DialogueLine("U", "w9", "", "")]

    def embed(texts):
        """Vectors of the number of the last turn, of which those of the two queries have larger
        products with nearer ones."""
        numbers = np.array([float(re.sub(r"\D", "", text.split()[-1]) or 99) for text in texts])
        ones = np.ones_like(numbers)
        return np.stack([numbers, ones if len(texts) == 2 else -0.5 * numbers**2], 1)

    rows = knowledge_examples(test, train, "wow_unseen", embed)
    (known,), (other,) = (list(row.values()) for row in rows)
    assert list(rows[0]) == ["T1 w4"] and list(rows[1]) == ["U w9"]
    assert known[-1] == "( w4 ) T1 => T1 is 4" and len(known) == 4
    # One of each topic, the most similar one last.
    assert other == ["( w10 ) T1 => T1 is 10", "( w8 ) T2 => T2 is 8", "( w9 ) T0 => T0 is 9"]


def test_question_encoder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join("[PAD] [UNK] [CLS] [SEP] [MASK] who is it ( )".split()))
    write_dpr(tmp_path / "dpr", vocabulary)
    found = question_encoder(str(tmp_path / "dpr"))(["who is it", "( who )"])
    model = transformers.DPRQuestionEncoder.from_pretrained(tmp_path / "dpr").eval()
    for row, ids in zip(found, ([2, 5, 6, 7, 3], [2, 8, 5, 9, 3]), strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([ids])).pooler_output[0].numpy()
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(ConfigError, match="is not a folder"):
        question_encoder(str(vocabulary))


def config_of(tmp_path, kind, prompts, lines, **more):
    (tmp_path / "p").write_text("".join(f"{line}\n" for line in prompts))
    (tmp_path / "i").write_text("".join(f"{line}\n" for line in lines))
    files = {"prompt_file": str(tmp_path / "p"), "sample_input_file": str(tmp_path / "i")}
    return MsdpConfig(task="MSDP-PROMPT", prompt_type=kind, **files, **more)


def test_prompts(tmp_path):
    rows = [json.dumps({"T hi": ["one ", "two"]}), json.dumps({"T hi": ["ignored"]})]
    config = config_of(tmp_path, "knowledge", rows, ["T\tbefore [SEP] hi\tk\ta"])
    assert prompts_of(config) == ["one \ntwo \n( hi ) T =>"]
    config = config_of(tmp_path, "knowledge", rows, ["T\tbye"])
    with pytest.raises(ConfigError, match="no examples for 'T bye'"):
        prompts_of(config)
    config = config_of(tmp_path, "knowledge", ['{"T hi": [1]}'], ["T\thi"])
    with pytest.raises(ConfigError, match="line 1: expected an object with a list of texts"):
        prompts_of(config)
    config = config_of(
        tmp_path, "response", ["A", "B", "C"], ["T\tit's\tk.\ta"], num_prompt_examples=2
    )
    asked = "Topic: T. User says: it 's We know that: k . System replies:"
    assert prompts_of(config) == [f"A \nB \n{asked}"]


def test_answers_of_a_server(tmp_path):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(content)
            texts = [content["prompts"][0] + " It's so.\nTopic"] if len(asked) < 2 else [7]
            body = json.dumps({"text": texts}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = config_of(tmp_path, "response", ["A"], ["T\thi\tk\ta"])
    flags = ["--task", "MSDP-PROMPT", "--prompt-type", "response", "--num-prompt-examples", "1"]
    flags += ["--prompt-file", config.prompt_file, "--sample-input-file", config.sample_input_file]
    flags += ["--api-prompt", "--out-seq-length", "7", "--megatron-api-url"]
    run_msdp(None, [*flags, f"http://127.0.0.1:{server.server_port}/api"])
    with pytest.raises(ConfigError, match="does not answer with a continuation: AttributeError"):
        run_msdp(None, [*flags, f"http://127.0.0.1:{server.server_port}/api"])
    server.shutdown()
    server.server_close()
    assert asked[0]["tokens_to_generate"] == 7 and asked[0]["top_k"] == 1
    assert (tmp_path / "i.out").read_text() == "It 's so .\n"
    with pytest.raises(ConfigError, match="does not answer"):
        run_msdp(None, [*flags, f"http://127.0.0.1:{server.server_port}/api"])


def test_lines_keep_what_is_not_a_line_feed(tmp_path):
    """Texts of the web have other separators, and an answer before the first search no topic."""
    turns = [
        DialogueLine("", "one\u2028two\x85", "k\x0c", "a\x1db"),
        DialogueLine("T", "c", "\x0b", ""),
    ]
    file = str(tmp_path / "lines")
    write_lines(file, ["\t".join(turn) for turn in turns])
    assert read_turns("--test_file", file) == turns
    assert with_knowledge(turns[:1], ["a\tb<|endoftext|>"])[0].knowledge == "a b"


def test_lines_that_are_wrong(tmp_path):
    file = tmp_path / "lines"
    file.write_text("topic alone\n")
    with pytest.raises(ConfigError, match="line 1 has 1 columns"):
        read_turns("--test_file", file)
    with pytest.raises(ConfigError, match="has 1 lines, and --test_file 2"):
        with_knowledge([DialogueLine("t", "c", "", "a")] * 2, ["k"])
    assert words("It's a cat. So?") == ["It", "'s", "a", "cat", ".", "So", "?"]
