"""tasks/main.py --task WIKITEXT103, LAMBADA and RAW against plain transformers, on any layout."""

import contextlib
import io
import json
import math
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from zeroshot_reference import lambada, make_gpt2, raw_json, wikitext  # noqa: E402

LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "dp2": (2, []),
    "tp2-dp2": (4, ["--tensor-model-parallel-size", "2"]),
    "tp2-sp-pp2": (
        4,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
        + ["--pipeline-model-parallel-size", "2"],
    ),
    "cp2": (2, ["--context-parallel-size", "2"]),
}
LENGTH = 24


def run_main(argv: list[str]) -> tuple[int, str, str]:
    """Exit status and output of tasks/main.py with these flags; for the pool."""
    from megatron.apps.tasks.command import run_task
    from megatron.run.process import errors_for_users

    output, errors = io.StringIO(), io.StringIO()
    sys.argv = ["tasks/main.py", *argv]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            with errors_for_users():
                run_task(None)
        except SystemExit as exit:
            return int(exit.code or 0), output.getvalue(), errors.getvalue()
    return 0, output.getvalue(), errors.getvalue()


def evaluated(pool, folder, layout, task, data, *flags, load=None):
    """The result of a task in --output, and the lines that the first rank printed."""
    size, parallel = LAYOUTS[layout]
    output = folder / "result.json"
    argv = ["--task", task, "--valid-data", data, "--load", load or folder / "hf", *flags]
    argv += ["--output", output, *parallel]
    outcomes = pool.run(size, run_main, [str(word) for word in argv])
    for status, _, errors in outcomes:
        assert status == 0, errors
    (evaluation,) = json.loads(output.read_text())["evaluations"]
    (result,) = evaluation["tasks"].values()
    assert not any(" | " in printed for _, printed, _ in outcomes[1:])
    return result, outcomes[0][1].splitlines()


class Corpus:
    """A model that knows its few sentences well enough to predict some of their words, and files
    of them."""

    length = LENGTH

    def __init__(self, folder: Path) -> None:
        random.seed(5)
        names = ["the wolf", "a fox", "Lord Ash", "my caf\u00e9", "no one", "Ms. O'Hara"]
        verbs = ["saw", "well-met", "paid 1,000 to", "ran (fast) to", "asked:"]
        self.sentences = [
            f"{a} {v} {b}, and {a} {w} {b}."
            for a, b, v, w in (
                (*random.sample(names, 2), *random.sample(verbs, 2)) for _ in range(60)
            )
        ]
        self.folder = folder
        shape = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
        self.model, self.tokenizer = make_gpt2(folder / "hf", self.sentences, 40, **shape)
        marks = [(",", " ,"), ("(", "( "), (")", " )"), (".", " ."), (":", " :")]
        words = "\n".join(self.sentences[:25]).replace("1,000", "1 @,@ 000").replace("-", " @-@ ")
        for mark, spaced in marks:
            words = words.replace(mark, spaced) if mark != "," else words
        words = words.replace(", and", " , and").replace("O'Hara", "O 'Hara")
        self.wiki = folder / "wiki.txt"
        self.wiki.write_text(" \n" + words.replace("\n", " \n ") + " \n")
        self.lambada = folder / "lambada.jsonl"
        texts = [sentence.removesuffix(".") for sentence in self.sentences[:21]]
        texts += ["so it goes: so", 'he said "stop" and "stop!"', texts[0] + " and " + texts[1]]
        self.lambada.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        self.json = folder / "documents.jsonl"
        self.json.write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in self.sentences[30:42])
        )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("zeroshot"))


class RealCorpus:
    """The same with GPT-2's vocabulary, WikiText-2 and LAMBADA, each in part."""

    length = 128

    def __init__(self, folder: Path, realdata: Path) -> None:
        self.folder = folder
        text = (realdata / "wikitext2" / "wiki.valid.raw").read_text()
        shape = {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}
        files = realdata / "gpt2_bpe"
        self.model, self.tokenizer = make_gpt2(folder / "hf", [text[-200_000:]], 8, files, **shape)
        self.wiki = folder / "wiki.valid.raw"
        self.wiki.write_text(text[:30_000])
        self.lambada = folder / "lambada.jsonl"
        rows = (realdata / "lambada" / "lambada_test_first1000.jsonl").read_text().splitlines(True)
        self.lambada.write_text("".join(rows[:200]))
        self.json = realdata / "openwebtext" / "openwebtext-1000.decoded.jsonl"


@pytest.fixture(scope="module")
def real_corpus(tmp_path_factory, realdata) -> RealCorpus:
    return RealCorpus(tmp_path_factory.mktemp("zeroshot"), realdata)


def check_wikitext(pool, corpus, layout, stride, *flags):
    result, printed = evaluated(
        pool,
        corpus.folder,
        layout,
        "WIKITEXT103",
        corpus.wiki,
        "--overlapping-eval",
        stride,
        *flags,
    )
    from megatron.apps.tasks.zeroshot.texts import detokenizer_of

    raw = corpus.wiki.read_bytes().decode()
    wanted = wikitext(
        corpus.model, corpus.tokenizer, raw, detokenizer_of("wiki")[1](raw), corpus.length, stride
    )
    found = result["metrics"]
    assert found.keys() == wanted.keys()
    assert found["loss"] == pytest.approx(wanted["loss"], abs=1e-6)
    assert found["token_ratio"] == wanted["token_ratio"]
    for name in ("perplexity", "adjusted_perplexity", "bits_per_byte"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5)
    line = (
        f" validation results on WIKITEXT103 | avg loss: {found['loss']:.4E} | "
        f"ppl: {found['perplexity']:.4E} | adjusted ppl: {found['adjusted_perplexity']:.4E} | "
        f"token ratio: {found['token_ratio']} |"
    )
    place = printed.index(line)
    assert printed[place - 1] == printed[place + 1] == "-" * (len(line) + 1)
    return result, printed


def check_lambada(pool, corpus, layout, strict, *flags):
    result, _ = evaluated(
        pool,
        corpus.folder,
        layout,
        "LAMBADA",
        corpus.lambada,
        *["--strict-lambada"] * strict,
        *flags,
    )
    lines = corpus.lambada.read_text().splitlines()
    right, total = lambada(corpus.model, corpus.tokenizer, lines, strict, corpus.length)
    assert (result["correct"], result["examples"]) == (right, len(lines))
    assert result["metrics"]["accuracy"] == right / len(lines)
    loss = -total / result["label_tokens"]
    assert result["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)
    perplexity = math.exp(min(20, -total / len(lines)))
    assert result["metrics"]["perplexity"] == pytest.approx(perplexity, rel=1e-5)
    return result


def check_raw(pool, corpus, layout, *flags):
    result, _ = evaluated(pool, corpus.folder, layout, "RAW", corpus.json, *flags)
    loss = raw_json(
        corpus.model,
        corpus.tokenizer,
        corpus.json.read_text().splitlines(),
        corpus.length,
        corpus.length,
    )
    assert result["metrics"]["loss"] == pytest.approx(loss, abs=1e-6)
    assert result["metrics"]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    return result


def test_wikitext_on_one_process(pool, corpus):
    flags = ["--micro-batch-size", "3", "--log-interval", "2", "--lr", "0.1"]
    result, printed = check_wikitext(pool, corpus, "one", 7, *flags)
    assert "> working on iteration: 0" in printed
    assert any("does not use --lr" in line for line in printed)
    assert result["tokens"] > 500


def test_lambada_on_two_processes(pool, corpus):
    result = check_lambada(pool, corpus, "dp2", True, "--eval-micro-batch-size", "5")
    assert result["contexts_cut"] >= 1
    assert 0 < result["correct"] < result["examples"] - 1  # else the test would show little


@pytest.mark.proof
@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(pool, corpus, layout, size):
    flags = ["--micro-batch-size", size]
    check_wikitext(pool, corpus, layout, 5, *flags)
    check_wikitext(pool, corpus, layout, LENGTH, *flags)
    check_lambada(pool, corpus, layout, True, *flags)
    check_lambada(pool, corpus, layout, False, *flags)
    check_raw(pool, corpus, layout, *flags)


@pytest.mark.proof
def test_a_limit_of_batches(pool, corpus):
    """--eval-iters counts global batches."""
    flags = ["--micro-batch-size", 2, "--eval-iters", 3]
    one, _ = evaluated(pool, corpus.folder, "one", "RAW", corpus.json, *flags)
    two, _ = evaluated(pool, corpus.folder, "dp2", "RAW", corpus.json, *flags)
    assert (one["examples"], two["examples"]) == (6, 12)


@pytest.mark.proof
@pytest.mark.realdata
@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "tp2-dp2"])
def test_real_text(pool, real_corpus, layout):
    check_wikitext(pool, real_corpus, layout, 32)
    check_lambada(pool, real_corpus, layout, True)
    check_lambada(pool, real_corpus, layout, False)
