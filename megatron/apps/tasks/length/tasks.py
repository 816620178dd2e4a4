"""Long-context tasks for lm-eval: documents, requests, and scores by length and depth."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import datasets
from lm_eval.api.group import AggMetricConfig, Group
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask, Task

from megatron.apps.tasks.harness.model import HarnessModel, TokenText
from megatron.apps.tasks.length.config import LengthConfig
from megatron.apps.tasks.length.haystacks import Essay, essay_of_file, essay_of_words, texts_of_file
from megatron.apps.tasks.length.ruler import ESSAY_TASKS, RULER, TASKS, Document, LengthTask
from megatron.config import ConfigError
from megatron.util.progress import say

BY_POSITION = "loss_by_position"
NAMES = (*TASKS, "ruler", BY_POSITION)
"""Names of the long-context tasks. ``ruler`` selects all of RULER's tasks."""
_PER_LENGTH = 500
"""Number of documents per task and length, as in RULER. --limit uses only the first ones."""
_SHORTEST_RANGE = 64
_MISSING = -1.0
"""Placeholder score for the metrics of other lengths, since lm-eval requires every metric from
every document."""


@dataclass(frozen=True)
class LengthPlan:
    """Long-context tasks among ``--tasks``, each with its file or None, and other names."""

    tasks: Mapping[str, Path | None]
    others: Sequence[str]

    @classmethod
    def of(cls, names: Sequence[str], flag: str = "--tasks") -> LengthPlan:
        """Separate the long-context tasks from the other names in ``flag``. Raises ConfigError if a
        task lacks the file that it needs, or has a file that it does not read."""
        tasks, others = dict[str, Path | None](), []
        for word in names:
            name, _, file = word.partition("=")
            if name not in NAMES:
                others.append(word)
                continue
            path = Path(file) if file else None
            if (name == BY_POSITION) and path is None:
                raise ConfigError(f"{flag} {name} needs texts: write {name}=FILE")
            if path is not None and name not in (BY_POSITION, "ruler", *ESSAY_TASKS):
                raise ConfigError(f"{flag} {word}: {name} reads no file; write {name}")
            tasks[name] = path
        return cls(tasks, others)

    @property
    def generates(self) -> bool:
        """True if a task needs the generation engine, to generate text or to score many answers
        after one prompt."""
        return any(name != BY_POSITION for name in self.tasks)

    def built(
        self, model: HarnessModel, lengths: LengthConfig, limit: float | None, seed: int
    ) -> list[Task | Group]:
        """Build the tasks with documents for a model's tokenizer and number of positions. Raises
        ConfigError if a length exceeds the model's positions, or if a file cannot be used."""
        builder = _Builder(model, lengths, limit, seed)
        return [builder.task(name, path) for name, path in self.tasks.items()]


class _Builder:
    """Builder of tasks for one model. ``limit`` is the value of --limit."""

    def __init__(
        self, model: HarnessModel, config: LengthConfig, limit: float | None, seed: int
    ) -> None:
        self._model, self._limit, self._seed = model, limit, seed
        self._lengths, self._depths = config.of_model(model.max_length), config.shares

    def task(self, name: str, path: Path | None) -> Task | Group:
        if name == BY_POSITION:
            assert path is not None
            return PositionLoss(self._windows(path), self._model.prefix_token_id)
        essay = essay_of_words() if path is None else essay_of_file(path, f"--tasks {name}")
        if name != "ruler":
            return self._generated(name, TASKS[name], essay)
        means: list[Any] = [
            AggMetricConfig(metric=str(length), weight_by_size=False) for length in self._lengths
        ]
        group = Group("ruler", aggregate_metric_list=means)
        for each, task in RULER.items():
            group.add(self._generated(each, task, essay))
        say("ruler: without qa_squad and qa_hotpot, which need data sets")
        return group

    def _generated(self, name: str, task: LengthTask, essay: Essay) -> ConfigurableTask:
        depths = self._depths if task.has_depth else [0.5]
        count = len(self._lengths) * _PER_LENGTH
        if self._limit is not None:
            count = math.ceil(self._limit if self._limit >= 1 else self._limit * count)
        tokens = partial(_tokens, self._model)
        documents = task.documents(name, self._lengths, depths, count, essay, tokens, self._seed)
        rows = [_row(n, length, document) for n, (length, document) in enumerate(documents)]
        config: dict[str, Any] = {
            "task": name,
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
            "test_split": "test",
            "doc_to_text": "input",
            "gen_prefix": "{{gen_prefix}}",
            "metric_list": [
                {"metric": str(length), "aggregation": mean_of_present, "higher_is_better": True}
                for length in self._lengths
            ],
            "metadata": {"version": 1.0},
        }
        if task.by_likelihood:
            config |= {
                "output_type": "multiple_choice", "doc_to_choice": "choices",
                "doc_to_target": "gold", "process_results": partial(_chosen, self._lengths),
            }  # fmt: skip
        else:
            config |= {
                "output_type": "generate_until", "doc_to_target": "outputs",
                "process_results": partial(_contained, self._lengths),
                "generation_kwargs": {
                    "do_sample": False, "max_gen_toks": task.new_tokens, "until": [],
                },
            }  # fmt: skip
        if task.by_likelihood:
            self._model.one_prompt.add(name)
        with _without_advice():
            built = ConfigurableTask(config=config)
        built.config.custom_dataset = None  # already read; results cannot contain it
        return built

    def _windows(self, path: Path) -> list[list[int]]:
        """Return the first tokens of each document, as many as the longest length. Shorter
        documents are skipped. Raises ConfigError if all documents are too short."""
        length, longest = self._lengths[-1], 0
        windows = []
        for text in texts_of_file(path, f"--tasks {BY_POSITION}"):
            tokens = list(self._model.text_tokenizer.tokenize(text))
            longest = max(longest, len(tokens))
            if len(tokens) >= length:
                windows.append(tokens[:length])
        if not windows:
            raise ConfigError(
                f"--tasks {BY_POSITION}={path}: its longest document has {longest} tokens, fewer "
                f"than --lengths {length}; give shorter lengths or longer documents"
            )
        return windows


def _tokens(model: HarnessModel, text: str) -> int:
    return len(model.text_tokenizer.tokenize(text))


def _row(number: int, length: int, document: Document) -> dict[str, Any]:
    """Return a document with lm-eval's field names. The index of the correct choice is random, so
    that a model that finds all choices equally likely is rarely correct."""
    row: dict[str, Any] = {
        "index": number, "input": document.prompt, "outputs": document.answers,
        "gen_prefix": document.prefix, "max_length": length, "depth": document.depth,
    }  # fmt: skip
    if document.wrong:
        choices = list(document.wrong)
        place = Random(number).randrange(len(choices) + 1)
        choices.insert(place, document.answers[0])
        row |= {"choices": choices, "gold": place}
    return row


@contextmanager
def _without_advice() -> Iterator[None]:
    """Suppress lm-eval's advice to use --metadata, which does not apply to tasks built in code."""
    logger = logging.getLogger("lm_eval.api.task")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def mean_of_present(scores: Sequence[float]) -> float:
    """Return the mean over the documents of the metric's length, or NaN without any."""
    present = [score for score in scores if score != _MISSING]
    return sum(present) / len(present) if present else math.nan


def contained_share(answer: str, texts: Sequence[str]) -> float:
    """Return RULER's score: the fraction of the texts that occur in the answer, ignoring case."""
    return sum(text.lower() in answer.lower() for text in texts) / len(texts)


def _scores(lengths: Sequence[int], doc: Mapping[str, Any], score: float) -> dict[str, float]:
    return {str(n): score if n == doc["max_length"] else _MISSING for n in lengths}


def _contained(lengths: Sequence[int], doc: Any, results: Sequence[str]) -> dict[str, float]:
    return _scores(lengths, doc, contained_share(results[0], doc["outputs"]))


def _chosen(lengths: Sequence[int], doc: Any, results: Sequence[Any]) -> dict[str, float]:
    log_probs = [log_prob for log_prob, _ in results]
    return _scores(lengths, doc, float(log_probs.index(max(log_probs)) == doc["gold"]))


class PositionLoss(ConfigurableTask):  # type: ignore[misc]
    """Loss by range of positions, in nats per token, on windows that start at the beginning of a
    document. Each range is as long as all ranges before it together, so that scoring all ranges
    costs two passes over a window."""

    def __init__(self, windows: Sequence[Sequence[int]], prefix: int) -> None:
        self._windows, self._prefix = windows, prefix
        length, edges = len(windows[0]), list[int]()
        while length >= _SHORTEST_RANGE:
            edges.append(length)
            length //= 2
        self.edges = [0, *reversed(edges)] if edges else [0, length]
        rows = [{"window": n, "text": ""} for n in range(len(windows))]
        config = {
            "task": BY_POSITION, "output_type": "loglikelihood", "test_split": "test",
            "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
            "doc_to_text": "text", "doc_to_target": "text",
            "process_results": self._losses,
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": False}
                for name in self.names
            ],
            "metadata": {"version": 1.0},
        }  # fmt: skip
        with _without_advice():
            super().__init__(config=config)
        self.config.custom_dataset = None

    @property
    def names(self) -> list[str]:
        """Names of the metrics, BEGIN-END. The end position is not part of the range."""
        return [f"{a}-{b}" for a, b in zip(self.edges, self.edges[1:], strict=False)]

    def construct_requests(self, doc: Any, ctx: Any, **kwargs: Any) -> list[Instance]:
        """Return one request per range, with token ids instead of texts."""
        for name in ("apply_chat_template", "chat_template"):
            kwargs.pop(name, None)
        tokens = self._windows[doc["window"]]
        return [
            Instance(
                request_type="loglikelihood", doc=doc, idx=number, **kwargs,
                arguments=(
                    TokenText.of([self._prefix, *tokens[:begin]]), TokenText.of(tokens[begin:end])
                ),
            )
            for number, (begin, end) in enumerate(zip(self.edges, self.edges[1:], strict=False))
        ]  # fmt: skip

    def _losses(self, doc: Any, results: Sequence[Any]) -> dict[str, float]:
        ranges = zip(self.names, self.edges, self.edges[1:], results, strict=False)
        return {name: -log_prob / (end - begin) for name, begin, end, (log_prob, _) in ranges}
