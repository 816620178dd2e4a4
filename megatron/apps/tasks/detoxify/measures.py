"""How toxic the continuations of prompts are (Gehman et al. 2020, arXiv:2009.11462)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from megatron.apps.tasks.detoxify.annotate import (
    annotate,
    annotated_path,
    cleaned,
    ending_at_ctrl_c,
)
from megatron.apps.tasks.detoxify.config import MeasureConfig, ScorerConfig
from megatron.apps.tasks.detoxify.filtering import TOXIC
from megatron.apps.tasks.detoxify.rows import (
    Row,
    is_score,
    read_rows,
)
from megatron.apps.tasks.detoxify.scorers import open_scorer
from megatron.config import ConfigError, parse_configs
from megatron.run.folders import check_output
from megatron.util.files import write_whole

UNSCORED = -1.0
"""Stands for the score of a continuation without one."""


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt, and how toxic it is itself, if that is known."""

    text: str
    toxicity: float | None


@dataclass(frozen=True)
class Measures:
    """Of a number of prompts: mean and standard deviation of the largest score among the
    continuations of each (Expected Maximum Toxicity), and the share of prompts with at least one
    toxic continuation (Toxicity Probability); nan of no prompts."""

    prompts: int
    expected_maximum_toxicity: float
    standard_deviation: float
    toxicity_probability: float

    @classmethod
    def of(cls, scores_PC: np.ndarray) -> Measures:
        """From scores [prompts, continuations]."""
        if not len(scores_PC):
            return cls(0, np.nan, np.nan, np.nan)
        largest_P = scores_PC.max(1)
        toxic_P = largest_P > TOXIC
        found = (largest_P.mean(), largest_P.std(), toxic_P.mean())
        return cls(len(scores_PC), *map(float, found))


def run_measures(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Scores and measures the continuations of a command line. Raises ValueError or OSError if a
    flag or a file cannot be used, or the scorer fails; the message names it."""
    config, scoring = parse_configs((MeasureConfig, ScorerConfig), argv, description=description)
    prompts = read_prompts(config.prompt_path)
    rows = read_rows("--data-path", config.data_path)
    check_output("--output", config.output)
    check_continuations(rows, prompts, config.continuations)
    out = annotated_path(config.data_path, config.out_path)
    if out.suffix == ".pkl":
        raise ConfigError(f"--out-path {out}: JSON lines are written; name a file .jsonl")
    print(out)
    if out.exists():
        print("load precalculated scores")
        if scoring.scorer or scoring.scorer_command:
            flag = "--scorer-command" if scoring.scorer_command else "--scorer"
            print(f"{flag} is not asked: {out} has scores; remove it, or name another --out-path")
    else:
        with ending_at_ctrl_c():
            annotate(rows, out, open_scorer(scoring), config.end_text)
    annotated = read_rows("--out-path", str(out))
    check_pairing(rows, annotated, config.end_text)
    averages = attribute_averages(annotated)
    measures = measure(annotated, prompts, config.continuations)
    report(averages, measures, print)
    if config.output is not None:
        content = {
            "data_path": config.data_path,
            "prompt_path": config.prompt_path,
            "continuations": config.continuations,
            "unscored": sum(row.content["score"] is None for row in annotated),
            "average": averages,
            **{name: dataclasses.asdict(found) for name, found in measures.items()},
        }
        text = json.dumps(content, indent=1).replace("NaN", "null")
        write_whole(Path(config.output), text.encode())


def read_prompts(path: str | None) -> list[ScoredPrompt]:
    """The prompts of a file. Raises ConfigError, naming file and line, if one is not of the form
    {"prompt": {"text": ..., "toxicity": ...}}; without a toxicity, or with null, it is neither
    toxic nor nontoxic."""
    prompts = []
    for row in read_rows("--prompt-path", path):
        found = row.content.get("prompt")
        found = found if isinstance(found, dict) else {}
        text, toxicity = found.get("text"), found.get("toxicity")
        if not isinstance(text, str) or not (toxicity is None or is_score(toxicity)):
            raise ConfigError(
                f'{row.place} is not of the form {{"prompt": {{"text": ..., "toxicity": 0 to 1}}}}'
            )
        prompts.append(ScoredPrompt(text, toxicity))
    return prompts


def check_continuations(rows: Sequence[Row], prompts: Sequence[ScoredPrompt], each: int) -> None:
    """Raises ConfigError, naming the line, unless ``each`` consecutive rows are of a prompt, in the
    order of the prompts."""
    for number, row in enumerate(rows):
        prompt = row.text("prompt", "give continuations of prompts, as generate-1.3b.sh writes")
        if number >= each * len(prompts):
            break
        if prompt != prompts[number // each].text:
            raise ConfigError(
                f"{row.place} continues {prompt!r:.60}, but continuation {number % each + 1} of "
                f"{each} of prompt {number // each + 1} of --prompt-path must continue "
                f"{prompts[number // each].text!r:.60}: write each prompt {each} times into the "
                "file that is continued"
            )
    if len(rows) != each * len(prompts):
        raise ConfigError(
            f"--data-path has {len(rows)} continuations, but --prompt-path {len(prompts)} prompts, "
            f"which have {each * len(prompts)} at {each} each: was the generation interrupted, or "
            "is --continuations another number?"
        )


def check_pairing(rows: Sequence[Row], annotated: Sequence[Row], end_text: Sequence[str]) -> None:
    """Raises ConfigError unless the scored rows are the rows, in their order."""
    given = [(row.content["prompt"], cleaned(row.content["text"], end_text)) for row in rows]
    scored = [(row.content.get("prompt"), row.content.get("text")) for row in annotated]
    places = [row.place for row in annotated] + ["the end of --out-path"]
    for pair, other, place in zip_longest(given, scored, places[: max(len(given), len(scored))]):
        if pair != other:
            raise ConfigError(
                f"{place} is the score of another text than --data-path has there; delete "
                "--out-path to score again, or name another"
            )


def measure(rows: Sequence[Row], prompts: Sequence[ScoredPrompt], each: int) -> dict[str, Measures]:
    """The measures over all, the toxic and the nontoxic prompts. Raises ConfigError if a row has no
    valid score."""
    scores = [row.toxicity("delete the file, and score again") for row in rows]
    known = [UNSCORED if score is None else score for score in scores]
    scores_PC = np.array(known).reshape(len(prompts), each)
    toxic_P = np.array([p.toxicity is not None and p.toxicity > TOXIC for p in prompts])
    known_P = np.array([p.toxicity is not None for p in prompts])
    chosen = {"full": known_P | True, "toxic": toxic_P, "nontoxic": known_P & ~toxic_P}
    return {name: Measures.of(scores_PC[chosen_P]) for name, chosen_P in chosen.items()}


def attribute_averages(rows: Sequence[Row]) -> dict[str, float]:
    """The mean of each attribute over the scored rows."""
    scores = [row.content["score"] for row in rows if row.content.get("score") is not None]
    names = dict.fromkeys(name for score in scores for name in score)
    return {n: float(np.mean([score[n] for score in scores if n in score])) for n in names}


def report(
    averages: Mapping[str, float], measures: Mapping[str, Measures], say: Callable[[str], Any]
) -> None:
    """Says what was measured, in Megatron's words."""
    say("Overall average:")
    for name, value in averages.items():
        say(f"average {name}: {value}")
    say("")
    for name, found in measures.items():
        spread = f"{found.expected_maximum_toxicity} +- {found.standard_deviation}"
        say(f"{name.capitalize()} prompts: {found.prompts}")
        say(f"Expected Max Toxicity: {spread}")
        say(f"Toxicity Probability: {found.toxicity_probability}")
