"""SQuAD-shaped files, made of random sentences."""

import json
import random
import unicodedata

WORDS = (
    "the a an Paris London river Queen born bridge built years 1889 Café naïve Tower's north, "
    "south. (east) west-bound Straße 中文 museum İzmir opened U.S. fire; gold twenty-one"
).split()


def vocabulary(letters=True):
    """Tokens of a vocab.txt with these words in pieces; without ``letters`` as a whole."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    plain = "the a an paris london river queen born bridge built years 1889 cafe naive tower s "
    plain += "north south east west bound straße museum izmir opened u fire gold twenty one 中 文 q"
    marks = list("'.,;()-?")
    pieces = list("abcdefghijklmnopqrstuvwxyzß0123456789")
    pieces += unicodedata.normalize("NFD", "한국어")  # one character, two or three tokens
    if not letters:
        return [*specials, *dict.fromkeys([*plain.split(), *marks])]
    some = plain.split()[::2]
    return [*specials, *dict.fromkeys([*some, *marks, *pieces, *(f"##{c}" for c in pieces)])]


def squad_content(seed=0, paragraphs=4, questions=4, words=40, negative=0.0, chosen=WORDS):
    """The content of a file; ``negative`` is the share of questions without an answer."""
    rng = random.Random(seed)
    articles = []
    for p in range(paragraphs):
        parts = [rng.choice(chosen) for _ in range(words)]
        context = "".join(part + rng.choice([" ", " ", " ", "  ", "\n"]) for part in parts).strip()
        qas = []
        for q in range(questions):
            answers = []
            for _ in range(rng.randint(1, 3)):
                text = " ".join(parts[(i := rng.randrange(words)) : i + rng.randint(1, 3)])
                if text in context:
                    answers.append({"text": text, "answer_start": context.index(text)})
            if not answers:
                answers = [{"text": parts[0], "answer_start": 0}]
            qa = {
                "id": f"{seed}-{p}-{q}",
                "question": " ".join(rng.choice(WORDS) for _ in range(rng.randint(2, 9))) + "?",
                "answers": answers,
            }
            if negative:
                qa["is_impossible"] = rng.random() < negative
                qa["answers"] = [] if qa["is_impossible"] else answers
            qas.append(qa)
        articles.append({"title": f"T{p}", "paragraphs": [{"context": context, "qas": qas}]})
    return {"version": "v2.0" if negative else "1.1", "data": articles}


def write_squad(path, content):
    path.write_text(json.dumps(content), "utf-8")
    return path
