"""Small files of questions, passages and dialogues in the forms of DPR, Natural Questions and the
two Wizards (of Wikipedia, of the Internet), made of texts, and a question encoder of DPR.

    python tests/helpers/retrieval_files.py FOLDER TEXTS.jsonl VOCAB
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

WORDS = 40
"""Words of a passage."""


def passages_of(texts: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Title and text of the passages of texts with titles."""
    passages = []
    for title, text in texts:
        words = text.split()
        parts = range(0, min(len(words), 4 * WORDS), WORDS)
        passages += [(title, " ".join(words[n : n + WORDS])) for n in parts]
    return passages


def write_questions(folder: Path, texts: list[tuple[str, str]], count: int = 16) -> None:
    """Writes evidence.tsv, questions.tsv and nq.json: words of a passage ask for those that follow
    them."""
    draw, passages = random.Random(7), passages_of(texts)
    with (folder / "evidence.tsv").open("w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["id", "text", "title"])
        table.writerows([n + 1, text, title] for n, (title, text) in enumerate(passages))
    questions, lines = [], []
    for title, text in draw.sample([each for each in passages if len(each[1].split()) > 12], count):
        words = text.split()
        asked, answer = " ".join(words[:8]), " ".join(words[8:11])
        lines.append(f"{asked}\t{[answer]!r}\n")
        hard, *others = [
            {"title": other, "text": words} for other, words in draw.sample(passages, 3)
        ]
        questions.append(
            {
                "question": f"{asked}?",
                "answers": [answer],
                "positive_ctxs": [{"title": title, "text": text}],
                "hard_negative_ctxs": [hard] * draw.randrange(2),
                "negative_ctxs": others,
            }
        )
    (folder / "questions.tsv").write_text("".join(lines))
    (folder / "nq.json").write_text(json.dumps(questions))


def wikipedia_dialogue(title: str, text: str, answers: int) -> dict:
    """A dialogue of Wizard of Wikipedia, whose wizard says what its knowledge says."""
    words = " ".join(text.replace("(", "").replace(")", "").split()[:120]).split()
    turns = [{"speaker": "0_Apprentice", "text": f"Tell me about {title}"}]
    for n in range(answers):
        known = f"{title} is " + " ".join(words[n * 15 : n * 15 + 15])
        turns += [
            {
                "speaker": "1_Wizard",
                "text": f"I have read that {known}",
                "checked_sentence": {"sentence": known},
                "checked_passage": {"passage": title},
            },
            {"speaker": "0_Apprentice", "text": f"And what is number {n} ?"},
        ]
    return {"chosen_topic": title, "dialog": turns}


def internet_dialogue(title: str, text: str) -> dict:
    known = " ".join(text.split()[:12])
    chosen = {"contents": [{"content": ["no", known]}], "selected_contents": [[0], [0, 1]]}
    history = [
        {"action": "Apprentice => Wizard", "text": "Hello there."},
        {"action": "Wizard => SearchAgent", "text": title},
        {"action": "SearchAgent => Wizard", "text": ""},
        {"action": "Wizard => Apprentice", "text": f"Well, {known}", "context": chosen},
    ]
    return {"dialog_history": history}


def write_dialogues(folder: Path, texts: list[tuple[str, str]]) -> None:
    """Writes the files that data_processing.sh reads."""
    for name, part in (
        ("train.json", texts[:40]),
        ("test_random_split.json", texts[:2]),
        ("test_topic_split.json", texts[40:42]),
    ):
        content = [wikipedia_dialogue(*each, answers=2) for each in part]
        (folder / name).write_text(json.dumps(content))
    lines = [json.dumps({str(n): internet_dialogue(*each)}) for n, each in enumerate(texts[:2])]
    (folder / "test.jsonl").write_text("\n".join(lines))


def write_dpr(folder: Path, vocabulary: Path) -> None:
    """Writes a question encoder of transformers with random weights."""
    from transformers import BertTokenizerFast, DPRConfig, DPRQuestionEncoder

    tokens = len(vocabulary.read_text().splitlines())
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DPRConfig(vocab_size=tokens, intermediate_size=32, **sizes)
    DPRQuestionEncoder(config).save_pretrained(folder)
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)


def process_dialogues(folder: Path) -> None:
    """Writes what data_processing.sh makes of the dialogues of known topics, in one process."""
    from megatron.apps.msdp.preprocessing import FUNCTIONS, PreprocessingConfig

    train, test = str(folder / "train_processed.txt"), str(folder / "testseen_processed.txt")
    out = str(folder / "output_testseen")
    for func, flags in (
        ("process_wow_dataset", {"raw_file": str(folder / "train.json"), "processed_file": train}),
        (
            "process_wow_dataset",
            {"raw_file": str(folder / "test_random_split.json"), "processed_file": test}
            | {"knwl_ref_file": f"{out}_knowledge_reference.txt"}
            | {"resp_ref_file": f"{out}_response_reference.txt"},
        ),
        (
            "get_knwl_gen_prompts",
            {"train_file": train, "test_file": test, "data_type": "wow_seen"}
            | {
                "model_file": str(folder / "dpr"),
                "processed_file": f"{out}_knowledge_prompts.json",
            },
        ),
        (
            "get_resp_gen_prompts",
            {"train_file": train, "processed_file": str(folder / "output_response_prompts.txt")},
        ),
    ):
        FUNCTIONS[func](PreprocessingConfig(func=func, **flags))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    out, file, vocabulary = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    titled = [(" ".join(text.split()[:4]), text) for text in rows]
    write_questions(out, titled)
    write_dialogues(out, titled)
    write_dpr(out / "dpr", vocabulary)
    process_dialogues(out)
