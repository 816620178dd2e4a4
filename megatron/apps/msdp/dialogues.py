"""Convert dialogues of Wizard of Wikipedia and Wizard of the Internet to lines, and build prompts
and examples from the lines.

A line contains topic, turns joined by `` [SEP] ``, knowledge and answer, separated by tabs, as in
Megatron's tasks/msdp/preprocessing.py (Liu et al. 2022, arXiv:2203.08745).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.config import ConfigError
from megatron.features.raw_text.encoder import SentenceSplitter, available_splitter, build_splitter
from megatron.util.files import write_whole

SEP = " [SEP] "
NO_KNOWLEDGE, NO_TOPIC = "no_passages_used", "no_topic"
END_OF_TEXT = "<|endoftext|>"
_SPACES = str.maketrans("", "", "\n\r\t")
_ACTIONS = ("Wizard => SearchAgent", "SearchAgent => Wizard", "Apprentice => Wizard")
_ANSWER = "Wizard => Apprentice"
_LONG_RUN = 10
"""Minimum run of consecutive answer words, all of them in the knowledge, that counts as overlap."""


class DialogueLine(NamedTuple):
    """Line of a data file: an answer, its topic and knowledge, and the preceding dialogue."""

    topic: str
    context: str
    knowledge: str
    answer: str

    @property
    def turns(self) -> list[str]:
        """The last three turns before the answer."""
        return self.context.split(SEP)[-3:]

    @property
    def key(self) -> str:
        """Key under which a prompt file has the knowledge examples for this line."""
        return f"{self.topic} {self.turns[-1]}"


def read_turns(flag: str, path: str | Path) -> list[DialogueLine]:
    """Read a file of dialogue lines. Answer, or knowledge and answer, may be missing. Raises
    ConfigError, with the line number, if a line has another number of columns."""
    turns = []
    for number, line in enumerate(read_lines(flag, path), 1):
        columns = line.split("\t")
        if not 2 <= len(columns) <= 4:
            raise ConfigError(
                f"{flag} {path}: line {number} has {len(columns)} columns; expected topic, turns, "
                "knowledge and answer with tabs between them"
            )
        turns.append(DialogueLine(*columns, *[""] * (4 - len(columns))))
    return turns


def read_lines(flag: str, path: str | Path) -> list[str]:
    """Read the lines of a text file, stripped. Only a line feed ends a line, because texts contain
    other separators such as U+2028. Raises ConfigError if the file is empty or cannot be read."""
    text = _read_text(flag, path)
    if not text:
        raise ConfigError(f"{flag} {path} is empty")
    return [line.strip(" \r") for line in text.removesuffix("\n").split("\n")]


def _read_text(flag: str, path: str | Path) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None


def write_lines(path: str, lines: Sequence[str]) -> None:
    """Write a text file atomically, and create its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(path), "".join(f"{line}\n" for line in lines).encode())


def words(text: str) -> list[str]:
    """Split a text into words and punctuation marks, as ``nltk.word_tokenize`` does if nltk's
    sentence model is installed. Otherwise sentences are split by rules."""
    from nltk.tokenize import NLTKWordTokenizer

    tokenizer = NLTKWordTokenizer()
    return [word for sentence in _splitter()(text) for word in tokenizer.tokenize(sentence)]


@cache
def _splitter() -> SentenceSplitter:
    return build_splitter(available_splitter("english"), "english", keep_newlines=False)


def wikipedia_turns(path: str) -> list[DialogueLine]:
    """Read the wizards' answers in a file of Wizard of Wikipedia, a JSON list of dialogues. Raises
    ConfigError if the file has another format."""
    text = _read_text("--raw_file", path)
    try:
        return [turn for dialogue in json.loads(text) for turn in _of_wikipedia(dialogue)]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _unreadable(path, "a list of dialogues of Wizard of Wikipedia", error) from None


def _of_wikipedia(dialogue: dict[str, Any]) -> Iterator[DialogueLine]:
    before = list[str]()
    for turn in dialogue["dialog"]:
        text = turn["text"].translate(_SPACES)
        text += "" if text.endswith(("?", ".", "!")) else "."
        if before and "wizard" in turn["speaker"].lower():
            sentences = list(turn["checked_sentence"].values())
            passages = list(turn["checked_passage"].values())
            topic = passages[0] if len(passages) == 1 else NO_KNOWLEDGE
            topic = dialogue["chosen_topic"] if topic == NO_KNOWLEDGE else topic
            knowledge = sentences[0] if sentences else NO_KNOWLEDGE
            own = (topic.translate(_SPACES), SEP.join(before), knowledge.translate(_SPACES))
            yield DialogueLine(*own, text)
        before.append(text)


def internet_turns(path: str) -> list[DialogueLine]:
    """Read the wizards' answers that use knowledge in a file of Wizard of the Internet, one
    dialogue per line. Raises ConfigError if the file has another format."""
    turns = []
    for number, line in enumerate(read_lines("--raw_file", path), 1):
        try:
            (dialogue,) = json.loads(line).values()
            turns += list(_of_internet(dialogue["dialog_history"]))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            wanted = "a dialogue of Wizard of the Internet"
            raise _unreadable(f"{path}, line {number}", wanted, error) from None
    return turns


def _of_internet(history: Sequence[dict[str, Any]]) -> Iterator[DialogueLine]:
    before, searched = list[str](), ""
    for item in history:
        action, text = item["action"], item["text"].translate(_SPACES)
        if action == "Wizard => SearchAgent":
            searched = text
        elif action == _ANSWER:
            knowledge = _chosen_sentence(item["context"]) if before else ""
            if knowledge:
                yield DialogueLine(searched, SEP.join(before), knowledge, text)
            before.append(text)
        elif action == "Apprentice => Wizard":
            before.append(text)
        elif action not in _ACTIONS:
            raise ValueError(f"action {action!r}")


def _chosen_sentence(context: dict[str, Any]) -> str:
    """Return the sentence that an answer uses: the first selected sentence on the last page that
    has any. Return "" if no sentence is selected."""
    (none, *_), *chosen = context["selected_contents"]
    sentence = ""
    for page, flags in zip(context["contents"], chosen, strict=True) if not none else ():
        of_page = [s for s, used in zip(page["content"], flags, strict=True) if used]
        sentence = of_page[0].translate(_SPACES) if of_page else sentence
    return sentence


def write_dataset(
    turns: Sequence[DialogueLine], lines: str, knowledge: str | None, answers: str | None
) -> None:
    """Write the dialogue lines and, if requested, files of their knowledge and answers' words."""
    write_lines(lines, ["\t".join(turn) for turn in turns])
    if knowledge is not None:
        write_lines(knowledge, [turn.knowledge for turn in turns])
    if answers is not None:
        write_lines(answers, [" ".join(words(turn.answer)) for turn in turns])


def response_examples(turns: Sequence[DialogueLine], count: int, seed: int) -> list[str]:
    """Sample ``count`` examples of answers that restate their knowledge. Words in long runs shared
    with the knowledge must be 0.6 to 0.9 of the answer, and at least 0.8 of the knowledge. Raises
    ConfigError if there are fewer such answers."""
    examples = []
    for turn in turns:
        if turn.knowledge == NO_KNOWLEDGE:
            continue
        known, answer = words(turn.knowledge), words(turn.answer)
        shared = overlap(answer, set(known))
        if 0.6 * len(answer) <= shared <= 0.9 * len(answer) and shared >= 0.8 * len(known):
            examples.append(response_prompt(turn) + " " + " ".join(answer))
    if len(examples) < count:
        raise ConfigError(
            f"--train_file has {len(examples)} answers that repeat their knowledge, and {count} "
            "examples are needed"
        )
    random = np.random.RandomState(seed)
    random.shuffle(examples)
    return examples[:count]


def overlap(answer: Sequence[str], known: set[str]) -> int:
    """Return the number of answer words in runs of at least :data:`_LONG_RUN` known words."""
    shared = run = 0
    for word in [*answer, None]:
        if word in known:
            run += 1
            continue
        shared, run = shared + (run if run >= _LONG_RUN else 0), 0
    return shared


def response_prompt(turn: DialogueLine) -> str:
    """Return the prompt with which an answer is generated."""
    asked, knowledge = (" ".join(words(text)) for text in (turn.turns[-1], turn.knowledge))
    return f"Topic: {turn.topic}. User says: {asked} We know that: {knowledge} System replies:"


def with_knowledge(turns: Sequence[DialogueLine], knowledge: Sequence[str]) -> list[DialogueLine]:
    """Replace the lines' knowledge by generated knowledge. Raises ConfigError if counts differ."""
    if len(turns) != len(knowledge):
        raise ConfigError(
            f"--knwl_gen_file has {len(knowledge)} lines, and --test_file {len(turns)}: both are "
            "of the same dialogues"
        )
    plain = (text.replace(END_OF_TEXT, "").replace("\t", " ") for text in knowledge)
    return [turn._replace(knowledge=text) for turn, text in zip(turns, plain, strict=True)]


def _unreadable(where: str, wanted: str, error: Exception) -> ConfigError:
    return ConfigError(f"--raw_file {where}: expected {wanted} ({type(error).__name__}: {error})")
