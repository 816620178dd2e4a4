"""Haystacks of long-context tasks: the words and sentences in which needles are hidden."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from megatron.apps.tasks.harness.documents import articles
from megatron.config import ConfigError
from megatron.util.json_text import parse_json

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""Sentences that RULER and passkey repeat as filler."""

ADJECTIVES = (
    "able amber ancient angry arctic bitter bold brave brief bright broken calm careful cheap "
    "clean clever cold common cosmic curious cyan damp daring dark deep dense distant dry dull "
    "eager early easy elastic empty equal exact faint fair famous fancy fast fierce firm flat "
    "fragile free fresh full gentle giant glad golden grand gray great green happy hard harsh "
    "heavy hidden hollow honest huge humble icy idle jolly keen kind large late lazy light little "
    "lively lonely long loud lovely low lucky mild modern narrow neat new noble noisy odd old open "
    "orange pale plain polite proud pure quick quiet rapid rare raw red rich rough round royal "
    "rude rural safe sharp shiny short shy silent silver simple slow small smooth soft solid sour "
    "square steep still strange strong sunny sweet swift tall tame thick thin tidy tiny tired "
    "tough true upper urban vague vast violet vivid warm weak wet white wide wild wise wooden young"
).split()
NOUNS = (
    "actor anchor apple arrow artist autumn bakery banana barrel basket beach beacon bell bird "
    "blanket boat border bottle bridge broom bucket butter button cabin camel camera candle canoe "
    "canyon captain carpet carrot castle cave chair channel cherry chimney circle cliff clock "
    "cloud coast coffee comet copper coral corner cotton cradle crystal curtain desert diamond "
    "dinner doctor dragon drawer dream eagle elbow engine evening falcon farmer feather fence "
    "field finger fire flag flower forest fountain fox frame garden gate ghost giraffe glacier "
    "glove goat guitar hammer harbor harvest hat hill honey horse hotel island jacket jungle "
    "kettle key king kitchen knight ladder lake lamp lantern leaf lemon letter library lion "
    "machine magnet maple market meadow melon mirror monkey moon morning mountain museum needle "
    "nest ocean office onion orchard otter oven owl paddle painter palace panther paper parrot "
    "pencil pepper piano pillow pilot planet pocket pond potato prince puzzle queen rabbit radio "
    "rain ribbon ring river road robin rocket roof rope sailor salmon school shadow shell shield "
    "ship singer sister snow spider spoon spring square stable star stone storm stream summer "
    "sunset table teacher temple thunder ticket tiger tower town train tree tunnel turtle valley "
    "village violin wagon walnut water weather whale window winter wizard wolf yard zebra"
).split()
VERBS = (
    "admires answers asks avoids builds buys calls carries catches chases cleans colors counts "
    "covers crosses describes draws drops enters feeds fills finds fixes follows forgets greets "
    "guards helps hides holds joins keeps knows leaves lifts likes loses marks meets misses moves "
    "notices opens orders owns paints passes plants praises pulls pushes reaches reads recalls "
    "remembers repairs returns saves sees sells sends shows skips studies surprises takes tells "
    "touches trades turns uses visits warns washes watches waters weighs"
).split()
WORDS = sorted({*ADJECTIVES, *NOUNS, *VERBS})

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_LONGEST_SENTENCE = 400
"""Maximum number of characters. Text without sentence ends is cut between words."""


def random_word(rng: Random) -> str:
    """Return a random key in RULER's format, adjective-noun."""
    return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"


def random_number(rng: Random, digits: int = 7) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def random_uuid(rng: Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(rng: Random, draw: Callable[[Random], str], count: int) -> list[str]:
    """Call ``draw`` until it has returned ``count`` different texts, and return these in order."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn[draw(rng)] = None
    return list(drawn)


def distinct_words(rng: Random, count: int) -> list[str]:
    """Return ``count`` different words from the lists. Compound words are added if the lists are
    too short."""
    if count <= len(WORDS):
        return rng.sample(WORDS, count)
    words = rng.sample(WORDS, len(WORDS)) + distinct(rng, random_word, count - len(WORDS))
    rng.shuffle(words)
    return words


class Essay:
    """Sentences of a text, repeated from the beginning if more are needed."""

    def __init__(self, sentences: Sequence[str]) -> None:
        self._sentences = list(sentences)

    def sentences(self, count: int) -> list[str]:
        """Return the first ``count`` sentences."""
        times = -(-count // len(self._sentences))
        return (self._sentences * times)[:count]


def essay_of_words(count: int = 5000) -> Essay:
    """Return random sentences made from the word lists. They are the same at every call."""
    rng = Random(0)
    a, n = ADJECTIVES, NOUNS
    return Essay(
        [
            f"The {rng.choice(a)} {rng.choice(n)} {rng.choice(VERBS)} the {rng.choice(n)} near "
            f"the {rng.choice(a)} {rng.choice(n)}."
            for _ in range(count)
        ]
    )


def essay_of_file(path: Path, flag: str) -> Essay:
    """Return the sentences of a text file, or of the ``text`` fields of JSON lines. Raises
    ConfigError, naming ``flag`` and the file, if the file cannot be read or has no text."""
    sentences = [part for text in texts_of_file(path, flag) for part in split_sentences(text)]
    if not sentences:
        raise ConfigError(f"{flag}: {path} has no sentences; name a file with text")
    return Essay(sentences)


def texts_of_file(path: Path, flag: str) -> list[str]:
    """Return the documents of a file: the ``text`` of each JSON line, the articles of a WikiText
    file, or any other text as a whole. Raises ConfigError, naming ``flag`` and the file, if the
    file cannot be read."""
    if not path.is_file():
        raise ConfigError(f"{flag}: {path} is not a file; name one with text")
    try:
        text = path.read_text("utf-8-sig")
        if path.suffix not in (".jsonl", ".json"):
            return articles(text)
        lines = (line for line in text.split("\n") if line.strip())
        return [parse_json(line, str(path))["text"] for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'{flag}: {path} must be UTF-8 text, or JSON lines with a "text": {error}'
        ) from None


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences without line breaks."""
    sentences = []
    for sentence in _SENTENCE_END.split(text.strip()):
        words: list[str] = []
        for word in sentence.split():
            if sum(map(len, words)) + len(words) > _LONGEST_SENTENCE:
                sentences.append(" ".join(words))
                words = []
            words.append(word)
        if words:
            sentences.append(" ".join(words))
    return sentences


def woven(sentences: Sequence[str], needles: Sequence[str], places: Sequence[float]) -> list[str]:
    """Insert each needle into the sentences. ``places`` contains, for each needle, the fraction
    from 0 to 1 of the sentences that precede it."""
    count = len(sentences)
    at = sorted((min(count, round(place * count)), n) for n, place in enumerate(places))
    result, last = list[str](), 0
    for index, needle in at:
        result += [*sentences[last:index], needles[needle]]
        last = index
    return result + [*sentences[last:]]
