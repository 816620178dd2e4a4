"""Files of tasks: GLUE, RACE, SQuAD, LAMBADA, WikiText, prompts, rows to score, evaluation sets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from detoxifying.annotate import read_rows
from fuzz.fuzzer import Fuzzer

from megatron.apps.corpus.collection.decontamination import task_texts
from megatron.apps.generation.generation.config import GenerateConfig, prompts_of
from megatron.apps.tasks.fine_tuning.examples import TABLES, answered, read_race
from megatron.apps.tasks.fine_tuning.squad_files import read_questions
from megatron.apps.tasks.zeroshot.tasks import Lambada, WikiText
from megatron.config import TokenizerConfig
from megatron.tokenizer import build_tokenizer

BYTES = build_tokenizer(TokenizerConfig(tokenizer_type="ByteLevelTokenizer"))


def writing(**contents: str) -> Callable[[Path], None]:
    """Makes files by their names, in which two underlines stand for a point."""

    def make(folder: Path) -> None:
        for name, text in contents.items():
            path = folder / name.replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


def write_tables(folder: Path) -> None:
    for name, table in TABLES.items():
        columns = table.train
        rows = [["index" if n == 0 else f"column{n}" for n in range(columns.width)]]
        for number in range(3):
            row = [f"word{number}"] * columns.width
            label = table.labels[0] if table.labels else "2.5"
            row[columns.label if columns.label is not None else -1] = label
            rows.append(row)
        lines = ("\t".join(row) + "\n" for row in rows[0 if columns.header else 1 :])
        (folder / f"{name}.tsv").write_text("".join(lines))


def read_tables(folder: Path) -> None:
    for name, table in TABLES.items():
        table.read(folder / f"{name}.tsv")


PASSAGE = {
    "article": "A long text. With sentences.",
    "questions": ["What is _ ?", "Why?"],
    "options": [["a", "b", "c", "d"], ["e", "f", "g", "h"]],
    "answers": ["A", "D"],
    "id": "high1.txt",
}
SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "One two three.",
                    "qas": [
                        {
                            "id": f"q{n}",
                            "question": "Which?",
                            "answers": [{"text": "two", "answer_start": 4}],
                            "is_impossible": False,
                        }
                        for n in range(3)
                    ],
                }
            ],
        }
    ],
}
LINES = "".join(json.dumps({"text": f"the {n} words of a text", "n": n}) + "\n" for n in range(4))


def read_all_race(folder: Path) -> None:
    for question in read_race(folder):
        for option in question.options:
            answered(question.question, option)


def read_prompts(folder: Path) -> None:
    prompts_of(GenerateConfig(load="x", prompt_file=str(folder / "a.txt")))
    prompts_of(GenerateConfig(load="x", prompt_file=str(folder / "b.jsonl")))
    prompts_of(GenerateConfig(load="x", sample_input_file=str(folder / "b.jsonl")))


def read_evaluation_sets(folder: Path) -> None:
    for name in ("a.tsv:text", "b.jsonl:text", "c.txt"):
        for _ in task_texts(f"{folder}/{name}"):
            pass


FUZZERS = (
    Fuzzer("glue", write_tables, read_tables),
    Fuzzer("race", writing(a__txt=json.dumps(PASSAGE) + "\n" + json.dumps(PASSAGE)), read_all_race),
    Fuzzer(
        "squad",
        writing(train__json=json.dumps(SQUAD)),
        lambda folder: read_questions(folder / "train.json", with_negative=False),
    ),
    Fuzzer(
        "lambada",
        writing(lambada__jsonl=LINES),
        lambda folder: Lambada(str(folder / "lambada.jsonl"), "text", BYTES, 64, strict=True),
    ),
    Fuzzer(
        "wikitext",
        writing(wiki__txt=" = Title = \n\n The words @-@ of 1 @,@ 000 <unk> texts . \n" * 3),
        lambda folder: WikiText(str(folder / "wiki.txt"), BYTES, 16, 8),
    ),
    Fuzzer(
        "prompts",
        writing(a__txt="one\ntwo\n", b__jsonl='{"prompt": "x"}\n{"prompt": {"text": "y"}}\n'),
        read_prompts,
    ),
    Fuzzer(
        "scored-rows",
        writing(a__jsonl=LINES),
        lambda folder: [
            row.text("text", "") for row in read_rows("--input", str(folder / "a.jsonl"))
        ],
    ),
    Fuzzer(
        "evaluation-sets",
        writing(a__tsv="text\tlabel\none\t1\n", b__jsonl=LINES, c__txt="x\ny\n"),
        read_evaluation_sets,
    ),
)
