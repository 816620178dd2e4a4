"""Documents of RULER's synthetic tasks (Hsieh et al. 2024, arXiv:2404.06654) and of passkey
retrieval (Mohtashami and Jaggi 2023, arXiv:2305.16300).

Templates and the numbers of needles and new tokens are from NVIDIA/RULER's synthetic.yaml. Keys and
values are generated from a seed, and lengths are measured with the model's tokenizer. A document's
size is in units, which are sentences or words of a list depending on the task.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from megatron.apps.tasks.length.haystacks import (
    NOISE,
    Essay,
    distinct,
    distinct_words,
    random_number,
    random_uuid,
    random_word,
    woven,
)
from megatron.config import ConfigError

WRONG_KEYS = 99
"""Number of wrong keys among which passkey by likelihood must find the correct one."""
_DRAWS = {"word": random_word, "number": random_number, "uuid": random_uuid}


class Document(NamedTuple):
    """Question about a long text.

    Attributes:
        prefix: beginning of the answer, included in the request.
        answers: texts that must all occur in the answer. For multiple choice, the correct choice.
        depth: relative position of the answer in the text, 0 to 1. None if it is in several places.
        wrong: the wrong choices of a multiple-choice question.
    """

    prompt: str
    prefix: str
    answers: list[str]
    depth: float | None = None
    wrong: tuple[str, ...] = ()

    @property
    def request(self) -> str:
        """Text that the model continues."""
        return f"{self.prompt} {self.prefix}"


class Scene(NamedTuple):
    """Inputs for building a document: random generator, size in units, depth of the answer from 0
    to 1, length in tokens, and filler text."""

    rng: Random
    units: int
    depth: float
    length: int
    essay: Essay


@dataclass(frozen=True)
class LengthTask:
    """Definition of a task.

    Attributes:
        make: function that builds a document.
        new_tokens: maximum number of tokens to generate.
        least: minimum size of a document, in units.
        by_likelihood: whether the model chooses the answer by likelihood instead of generating it.
        has_depth: whether the answer is at a single depth."""

    make: Callable[[Scene], Document]
    new_tokens: int
    least: int = 1
    by_likelihood: bool = False
    has_depth: bool = field(default=False, kw_only=True)

    def documents(
        self,
        name: str,
        lengths: Sequence[int],
        depths: Sequence[float],
        count: int,
        essay: Essay,
        tokens: Callable[[str], int],
        seed: int,
    ) -> list[tuple[int, Document]]:
        """Return ``count`` documents, each with its length. The lengths alternate, and the depth
        changes after each round of lengths. A document depends only on the seed, ``name``, its
        length, and the number of earlier documents of that length. Raises ConfigError if the
        smallest document does not fit into a length."""
        units = {length: self._units(name, length, essay, tokens, seed) for length in lengths}
        result = []
        for number in range(count):
            length, turn = lengths[number % len(lengths)], number // len(lengths)
            size, depth = units[length], depths[turn % len(depths)]
            while True:
                rng = Random(f"{seed} {name} {length} {turn}")
                document = self.make(Scene(rng, size, depth, length, essay))
                if size == self.least or self._total(document, tokens) <= length:
                    break
                size = max(self.least, size - max(1, size // 200))
            result.append((length, document))
        return result

    def _total(self, document: Document, tokens: Callable[[str], int]) -> int:
        return tokens(document.request) + self.new_tokens

    def _units(
        self, name: str, length: int, essay: Essay, tokens: Callable[[str], int], seed: int
    ) -> int:
        """Return the largest size in units with which a document fits into ``length`` tokens, to
        within 1 %."""

        def fits(units: int) -> bool:
            scene = Scene(Random(f"{seed} {name} {length}"), units, 0.5, length, essay)
            return self._total(self.make(scene), tokens) <= length

        low = self.least
        if not fits(low):
            raise ConfigError(
                f"--lengths {length} has no room for a document of {name} and {self.new_tokens} "
                "new tokens with this tokenizer; give longer lengths or leave the task out"
            )
        high = 2 * low
        while fits(high):
            low, high = high, 2 * high
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def _noise(scene: Scene) -> list[str]:
    return [NOISE] * scene.units


def _essay(scene: Scene) -> list[str]:
    return scene.essay.sentences(scene.units)


def _needle(kind: str, key: str, value: str) -> str:
    return f"One of the special magic {kind}s for {key} is: {value}."


def _other_needles(key_kind: str, kind: str, scene: Scene) -> list[str]:
    draws = _DRAWS[key_kind], _DRAWS[kind]
    return [_needle(kind, *(draw(scene.rng) for draw in draws)) for _ in range(scene.units)]


def niah_prompt(kind: str, context: str, keys: Sequence[str], single: bool) -> tuple[str, str]:
    """Return the prompt and the beginning of the answer for finding the values of ``keys`` in
    ``context``. ``kind`` is "number" or "uuid"; ``single`` means that there is only one value."""
    query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
    if single:
        some, s, be, all_of = "A", "", "is", "is the"
    else:
        some, s, be, all_of = "Some", "s", "are", "are all the"
    prompt = (
        f"{some} special magic {kind}{s} {be} hidden within the following text. Make sure to "
        f"memorize it. I will quiz you about the {kind}{s} afterwards.\n{context}\nWhat {all_of} "
        f"special magic {kind}{s} for {query} mentioned in the provided text?"
    )
    return prompt, f"The special magic {kind}{s} for {query} mentioned in the provided text {be}"


def _niah(
    haystack: Callable[[Scene], list[str]],
    scene: Scene,
    key_kind: str = "word",
    kind: str = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Document:
    """Build a needle-in-a-haystack document: ``keys`` keys with ``values`` values each, of which
    the values of ``queries`` keys must be found."""
    rng = scene.rng
    names = distinct(rng, _DRAWS[key_kind], keys)
    numbers = [distinct(rng, _DRAWS[kind], values) for _ in names]
    asked = sorted(rng.sample(range(keys), queries))
    single = queries * values == 1
    needles = [
        _needle(kind, k, v) for k, several in zip(names, numbers, strict=True) for v in several
    ]
    places = [rng.random() for _ in needles]
    if single:
        places[asked[0]] = scene.depth
    joint = " " if haystack is _essay else "\n"
    context = joint.join(woven(haystack(scene), needles, places))
    prompt, prefix = niah_prompt(kind, context, [names[n] for n in asked], single)
    answers = [value for n in asked for value in numbers[n]]
    return Document(prompt, prefix, answers, scene.depth if single else None)


def vt_prompt(context: str, value: str, variables: int) -> tuple[str, str]:
    """Return prompt and beginning of the answer for variable tracking. The typo is RULER's."""
    prompt = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text."
        f"\n\n{context}\nQuestion: Find all variables that are assigned the value {value} in the "
        "text above."
    )
    prefix = (
        "Answer: According to the chain(s) of variable assignment in the text above, "
        f"{variables} variables are assgined the value {value}, they are:"
    )
    return prompt, prefix


def vt_context(sentences: Sequence[str], chain: Sequence[str], places: Sequence[int]) -> str:
    """Join the sentences, with the assignments of a chain inserted before the sorted ``places``."""
    lines = list(sentences)
    for moved, (place, assignment) in enumerate(zip(places, chain, strict=True)):
        lines.insert(place + moved, assignment)
    return " ".join(lines).replace(". \n", ".\n")


def _chain(rng: Random, units: int, letters: int, hops: int) -> Document:
    def name(rng: Random) -> str:
        return "".join(rng.choices(string.ascii_uppercase, k=letters))

    variables = distinct(rng, name, hops + 1)
    value = str(rng.randrange(10000, 99999))
    chain = [f"VAR {variables[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in zip(variables, variables[1:], strict=False)]
    places = sorted(rng.sample(range(units), len(chain)))
    context = vt_context([NOISE + "\n"] * units, chain, places)
    return Document(*vt_prompt(context, value, len(variables)), variables)


def _variable_tracking(scene: Scene, hops: int = 4, example_units: int = 10) -> Document:
    """Build a document with a chain of assignments, after an example with shorter names."""
    example = _chain(scene.rng, example_units, 3, hops)
    asked = _chain(scene.rng, scene.units, 5, hops)
    shown = f"{example.request} {' '.join(example.answers)}\n\n\n\n"
    return asked._replace(prompt=shown + asked.prompt)


def cwe_prompt(words: Sequence[str]) -> tuple[str, str]:
    """Return the prompt and the beginning of the answer for finding the common words of a list."""
    prompt = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{numbered(words)}\nQuestion: What are the 10 "
        "most common words in the above list?"
    )
    return prompt, "Answer: The top 10 words that appear most often in the list are:"


def numbered(words: Sequence[str]) -> str:
    return " ".join(f"{n}. {word}" for n, word in enumerate(words, 1))


def _common_words(scene: Scene) -> Document:
    """Build a list in which ten words are more frequent than the others, after an example."""
    short = scene.length < 4096

    def one(units: int, often: int, seldom: int) -> Document:
        words = distinct_words(scene.rng, units)
        listed = words[:10] * often + words[10:] * seldom
        scene.rng.shuffle(listed)
        return Document(*cwe_prompt(listed), words[:10])

    example = one(*((20, 3, 1) if short else (40, 10, 3)))
    asked = one(scene.units, *((6, 1) if short else (30, 3)))
    return asked._replace(prompt=f"{example.request} {numbered(example.answers)}\n{asked.prompt}")


def fwe_words(vocabulary: Sequence[str], count: int) -> list[str]:
    """Return about ``count`` words whose frequencies follow Zipf's law with exponent 2: the word of
    rank r occurs count / (zeta(2) r^2) times, rounded down, where zeta(2) is pi^2 / 6."""
    share = count / (math.pi**2 / 6)
    return [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(share / rank**2))]


def fwe_prompt(words: Sequence[str]) -> tuple[str, str]:
    """Return prompt and beginning of the answer for the frequent words of a coded text."""
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {' '.join(words)}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        "words in the above coded text?"
    )
    prefix = (
        "Answer: According to the coded text above, the three most frequently appeared words are:"
    )
    return prompt, prefix


def _frequent_words(scene: Scene) -> Document:
    def coded(rng: Random) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=6))

    # The most frequent "word" is noise, which the prompt tells the model to ignore.
    vocabulary = ["...", *distinct(scene.rng, coded, max(20, scene.length // 50))]
    words = fwe_words(vocabulary, scene.units)
    scene.rng.shuffle(words)
    return Document(*fwe_prompt(words), vocabulary[1:4])


def _passkey(scene: Scene) -> Document:
    """Build a document that hides a five-digit number in repeated sentences."""
    key, *wrong = distinct(scene.rng, partial(random_number, digits=5), 1 + WRONG_KEYS)
    needle = f"The pass key is {key}. Remember it. {key} is the pass key."
    text = "\n".join(woven(_noise(scene), [needle], [scene.depth]))
    prompt = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        f"it. I will quiz you about the important information there.\n{text}\nWhat is the pass key?"
    )
    return Document(prompt, "The pass key is", [key], scene.depth, tuple(wrong))


RULER = {
    "niah_single_1": LengthTask(partial(_niah, _noise), 128, has_depth=True),
    "niah_single_2": LengthTask(partial(_niah, _essay), 128, has_depth=True),
    "niah_single_3": LengthTask(partial(_niah, _essay, kind="uuid"), 128, has_depth=True),
    "niah_multikey_1": LengthTask(partial(_niah, _essay, keys=4), 128, has_depth=True),
    "niah_multikey_2": LengthTask(
        partial(_niah, partial(_other_needles, "word", "number")), 128, has_depth=True
    ),
    "niah_multikey_3": LengthTask(
        partial(_niah, partial(_other_needles, "uuid", "uuid"), key_kind="uuid", kind="uuid"),
        128,
        has_depth=True,
    ),
    "niah_multivalue": LengthTask(partial(_niah, _essay, values=4), 128),
    "niah_multiquery": LengthTask(partial(_niah, _essay, keys=4, queries=4), 128),
    "ruler_vt": LengthTask(_variable_tracking, 30, least=6),
    "ruler_cwe": LengthTask(_common_words, 120, least=20),
    "ruler_fwe": LengthTask(_frequent_words, 50, least=50),
}
"""RULER's tasks by their lm-eval names. The two question-answering tasks are missing because they
need datasets."""
ESSAY_TASKS = [
    *("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
]
"""Tasks that hide their needles in an essay instead of repeated sentences."""
TASKS = {
    **RULER,
    "passkey": LengthTask(_passkey, 8, by_likelihood=True, has_depth=True),
    "passkey_generate": LengthTask(_passkey, 8, has_depth=True),
}
