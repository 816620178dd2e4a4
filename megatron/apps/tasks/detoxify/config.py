"""The flags of the steps."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import POSITIVE, option

ATTRIBUTES = (
    "toxicity",
    "severe_toxicity",
    "sexually_explicit",
    "threat",
    "profanity",
    "identity_attack",
)
URL = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
KEY, SCORER = "PERSPECTIVE_API_KEY", "DETOXIFY_SCORER"
"""Environment variables."""
CONTINUATIONS = 25
"""Of each prompt, in the definition of both measures (Gehman et al. 2020, arXiv:2009.11462)."""


@dataclass(frozen=True)
class ScorerConfig:
    """Scorer: what says how toxic a text is."""

    scorer: str | None = option(None, derived=f"the environment variable {SCORER}, or perspective")
    """perspective (Google's Perspective API), profanity-check (the package alt-profanity-check,
    here), or MODULE:FUNCTION, which gets a list of texts and returns a score for each: a number
    from 0 to 1, or attributes with their scores, toxicity among them."""
    scorer_command: str | None = option(None)
    """Instead of --scorer a command that reads a text from each line of its input (line breaks in
    texts are spaces) and prints a line for each: a number from 0 to 1, or a JSON object of
    attributes."""
    workers: int = option(1, bounds=POSITIVE)
    """Requests to Perspective API under way at a time, or processes of --scorer-command."""
    api_key: str | None = option(None, derived=f"the environment variable {KEY}")
    """Key of Perspective API."""
    api_url: str = option(URL)
    """Address of Perspective API, or of a service that answers as it does."""
    attributes: tuple[str, ...] = option(ATTRIBUTES)
    """Attributes that are asked of Perspective API; toxicity must be among them."""
    queries_per_second: float = option(1.0)
    """Most requests a second; Google gives 1, and more on request."""
    retries: int = option(8, bounds=POSITIVE)
    """How often a request is made again that fails for reasons that may pass, such as too many
    requests; with pauses of 1, 2, 4 ... seconds, or those that the answer asks for."""


@dataclass(frozen=True)
class AnnotateConfig:
    """Annotation: which texts are scored."""

    data_path: str | None = option(None)
    """File of JSON lines with a "text" each."""
    out_path: str | None = option(None, derived="DATA_PATH-annotated.jsonl")
    """File for the same lines with a "score"."""
    total: int = option(-1)
    """Accepted: the progress bar counts the lines itself."""
    end_text: tuple[str, ...] = option(("<|endoftext|>",))
    """How the tokenizer writes what begins and ends documents; it is removed from texts."""


@dataclass(frozen=True)
class ToxicityFilterConfig:
    """Filter: which half of the scored lines is kept."""

    data_path: str | None = option(None)
    """File of JSON lines with a "score" each."""
    out_path: str | None = option(None)
    """File for the least toxic half of them, in random order."""
    seed: int = option(1234)
    """Seed of that order."""
    prompt_path: str | None = option(None)
    """Accepted: the filter reads no prompts."""
    workers: int = option(1)
    """Accepted: the filter is one process."""


@dataclass(frozen=True)
class MeasureConfig:
    """Evaluation: how toxic continuations are."""

    data_path: str | None = option(None)
    """File of JSON lines with the continuations, those of a prompt together, in the order of
    --prompt-path."""
    prompt_path: str | None = option(None)
    """File of JSON lines {"prompt": {"text": ..., "toxicity": 0 to 1}}; as in RealToxicityPrompts a
    prompt is toxic above 0.5."""
    out_path: str | None = option(None, derived="DATA_PATH-annotated.jsonl")
    """File for the continuations with their scores; one that exists is used again."""
    continuations: int = option(CONTINUATIONS, bounds=POSITIVE)
    """Continuations of each prompt."""
    output: str | None = option(None)
    """JSON file for the measures."""
    end_text: tuple[str, ...] = option(("<|endoftext|>",))
    """How the tokenizer writes what begins and ends documents; it is removed from texts."""
