"""Flags of ``tools/generate.py`` in addition to the training flags, and readers of prompt files."""

from __future__ import annotations

import io
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.apps.generation.memory import ServedConfig
from megatron.apps.generation.request import Sampling
from megatron.config import ConfigError
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, Bounds, flag_of, option
from megatron.tokenizer.base import read_text
from megatron.util.json_text import parse_json

_TEMPERATURE = Bounds(
    lambda value: value > 0, "must be positive; --greedy always takes the most probable token"
)
_TOP_K = Bounds(lambda value: value >= 0, "must not be negative; 0 draws among all tokens")
_TOP_P = Bounds(lambda value: 0 <= value <= 1, "must be in [0, 1]; 0 or 1 draws among all tokens")
_MIN_P = Bounds(lambda value: 0 <= value <= 1, "must be in [0, 1]; 0 draws among all tokens")


@dataclass(frozen=True)
class GenerateConfig(ServedConfig):
    """Text generation: checkpoint, prompts and sampling."""

    load: str | None = option(None)
    """Checkpoint, or folder of checkpoints, of this project, Hugging Face, Megatron or
    DeepSpeed."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint to load."""
    prompt: str | None = option(None)
    """Text to continue. An empty text starts a new document."""
    prompt_file: str | None = option(None)
    """File with one prompt per line. In a .jsonl file each line is {"prompt": "..."}."""
    output: str | None = option(None)
    """JSON-lines file for the texts. Without it they are printed."""
    sample_input_file: str | None = option(None)
    """Prompt file in Megatron's format: each line is {"prompt": {"text": "..."}}, or the text
    itself if the file is not JSON."""
    sample_output_file: str | None = option(None, derived="that of --sample-input-file with .out")
    """JSON-lines file for the texts of --sample-input-file, with text, all_text, prompt and id."""
    genfile: str | None = option(None)
    """JSON-lines file for --num-samples new documents, with text, all_text, prompt and id."""
    chat: bool = option(False)
    """Treat prompts as messages to an instruct model, formatted with its tokenizer's chat template.
    On a terminal each line continues the conversation."""
    max_new_tokens: int | None = option(
        None, derived="128; with --chat all that the model has room for",
        aliases=("--out-seq-length",), bounds=POSITIVE,
    )  # fmt: skip
    """Maximum number of tokens to add to a prompt."""
    temperature: float | None = option(None, derived="1.0", bounds=_TEMPERATURE)
    """Divisor of the logits. Lower values are more deterministic, higher values more random."""
    top_k: int | None = option(
        None, derived="0, all tokens", aliases=("--top_k",), bounds=_TOP_K
    )  # fmt: skip
    """Sample only from this number of most probable tokens."""
    top_p: float | None = option(
        None, derived="1.0, all tokens", aliases=("--top_p",), bounds=_TOP_P
    )  # fmt: skip
    """Sample only from the fewest most probable tokens whose probabilities sum to at least this."""
    min_p: float | None = option(
        None, derived="0.0, all tokens", aliases=("--min_p",), bounds=_MIN_P
    )  # fmt: skip
    """Sample only from tokens whose probability is at least this fraction of the highest one."""
    repetition_penalty: float = option(1.0, aliases=("--repetition_penalty",), bounds=POSITIVE)
    """Penalty for tokens that occur in the prompt or the text: positive logits are divided by it,
    negative ones multiplied."""
    retro: bool = option(False)
    """Retrieve the neighbours of a RETRO model's text as it grows, and report the retrieved texts.
    Without it the model attends to no neighbours."""
    retro_project_dir: str | None = option(None, aliases=("--retro-workdir",))
    """Output folder of tools/retro/preprocess_data.py, with the database that --retro searches."""
    greedy: bool = option(False)
    """Always choose the most probable token."""
    seed: int = option(1234)
    """Random seed for sampling."""
    num_samples: int | None = option(
        None, derived="1; all prompts of --sample-input-file", bounds=NOT_NEGATIVE
    )
    """Number of texts per prompt. With --genfile or --sample-input-file, the total number of texts.
    0 disables generation without a prompt: --genfile is not written, and prompts are read from
    --sample-input-file or, line by line, from the terminal."""
    micro_batch_size: int = option(
        64, flag="--batch-size", aliases=("--micro-batch-size",), bounds=POSITIVE
    )
    """Maximum number of texts that are generated concurrently."""
    recompute: bool = option(
        False, note="keys and values of earlier tokens are kept, and the texts are the same"
    )
    max_tokens_to_oom: int | None = option(
        None, note="texts wait until there is memory for their keys and values"
    )
    use_tutel: bool = option(False, note="the experts of every model are computed without it")
    ds_inference: bool = option(False, note="this project's own engine generates")
    inference_batch_times_seqlen_threshold: int | None = option(
        None, note="each step has the tokens of all texts that are generated"
    )

    def __post_init__(self) -> None:
        """Check the flags. Raises ConfigError if they contradict each other."""
        if self.load is None:
            raise ConfigError("--load is missing")
        sources = self._given("prompt", "prompt_file", "sample_input_file")
        if self.num_samples == 0 and sources and self.sample_input_file is None:
            raise ConfigError(
                f"--num-samples 0 and {sources[0]}: nothing would be written; leave one of them out"
            )
        sources += self._given("genfile") if self.num_samples != 0 else []
        if len(sources) > 1:
            raise ConfigError(f"{' and '.join(sources)}: give one of them")
        if self.output is not None and self.prompt is None and self.prompt_file is None:
            raise ConfigError("--output needs --prompt or --prompt-file")
        if self.sample_output_file is not None and self.sample_input_file is None:
            raise ConfigError("--sample-output-file needs --sample-input-file")
        if len(self.adapter) > 1:
            raise ConfigError(
                f"--adapter {' '.join(self.adapter)}: all texts have one adapter here; give one, "
                "or start tools/run_text_generation_server.py, where each request chooses"
            )
        if self.retro and self.retro_project_dir is None:
            raise ConfigError(
                "--retro needs --retro-project-dir, the folder whose database is searched"
            )
        files = self._given("genfile", "sample_input_file")
        if self.chat and files:
            raise ConfigError(f"--chat and {files[0]}: give messages by --prompt or --prompt-file")
        drawn = self._given("temperature", "top_k", "top_p", "min_p")
        if self.greedy and drawn:
            raise ConfigError(f"--greedy does not sample; remove it or {drawn[0]}")
        several = self.num_samples is not None and self.num_samples > 1
        if self.greedy and several and self.sample_input_file is None:
            raise ConfigError(f"--num-samples {self.num_samples} --greedy: all would be equal")

    @property
    def texts(self) -> int:
        """Maximum number of texts that run concurrently."""
        return self.micro_batch_size

    def _given(self, *names: str) -> list[str]:
        """Return those flags of the fields ``names`` that are set."""
        return [
            flag_of(field)
            for field in fields(self)
            if field.name in names and getattr(self, field.name) is not None
        ]

    @property
    def outputs(self) -> dict[str, str]:
        """Path of the output file, keyed by its flag. Empty if texts are printed."""
        if self.output is not None:
            return {"--output": self.output}
        if self.genfile is not None and self.num_samples != 0:
            return {"--genfile": self.genfile}
        if self.sample_input_file is not None:
            path = self.sample_output_file or f"{self.sample_input_file}.out"
            return {"--sample-output-file": path}
        return {}

    def sampling(self) -> Sampling:
        """Return the sampling parameters and seed that the flags set."""
        return Sampling(
            greedy=self.greedy,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p or 1.0,
            min_p=self.min_p or 0.0,
            repetition_penalty=self.repetition_penalty,
            seed=self.seed,
        )


def unused_flags(options: Any) -> list[str]:
    """Return a message for each given flag that is accepted but has no effect."""
    return [
        f"{flag_of(field)} is accepted and not used: {field.metadata['note']}"
        for field in fields(options)
        if field.metadata.get("note") and getattr(options, field.name) != field.default
    ]


def prompts_of(options: GenerateConfig) -> list[str] | None:
    """Return the prompts that the flags specify, or None if they specify none. Raises ValueError or
    OSError if a file cannot be used."""
    if options.prompt is not None:
        return [options.prompt]
    if options.prompt_file is not None:
        is_json = Path(options.prompt_file).suffix == ".jsonl"
        return _read("--prompt-file", options.prompt_file, '{"prompt": "..."}', is_json)
    if options.sample_input_file is not None:
        form = '{"prompt": {"text": "..."}}'
        return _read("--sample-input-file", options.sample_input_file, form)
    if options.genfile is not None and options.num_samples != 0:
        return [""] * (options.num_samples or 1)
    return None


def _read(flag: str, path: str, form: str, is_json: bool | None = None) -> list[str]:
    """Return the lines of a file, or the prompts in them if they are JSON. If ``is_json`` is None,
    the first line decides."""
    # str.splitlines would also split at line separators that JSON strings may contain unescaped.
    lines = [line.rstrip("\n") for line in io.StringIO(read_text(path, flag), newline=None)]
    if is_json is None and lines:
        is_json = isinstance(_json(lines[0]), dict)
    prompts = [] if is_json else lines
    for number, line in enumerate(lines if is_json else [], 1):
        match _json(line):
            case {"prompt": str(text)} | {"prompt": {"text": str(text)}}:
                prompts.append(text)
            case _ if line.strip():
                raise ValueError(f"{flag} {path}, line {number} is not of the form {form}")
    if not prompts:
        raise ValueError(f"{flag} {path} has no prompt")
    return prompts


def _json(line: str) -> Any:
    try:
        return parse_json(line, "a line", lenient=True)
    except ValueError:
        return None
