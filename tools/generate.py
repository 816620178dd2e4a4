#!/usr/bin/env python
# PYTHON_ARGCOMPLETE_OK
"""Generates text from a training checkpoint.

    python tools/generate.py --load checkpoints --prompt 'def main():' --temperature 0.8 --top-p 0.9

Without a prompt it reads prompts line by line until "stop", and shows each text while it is
generated.
"""

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import write_text
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError, ModelConfig, parse_configs
from megatron.config.flags import option
from megatron.inference.generate import (
    Continuation,
    OnToken,
    generate,
)
from megatron.inference.load import load_model, load_tokenizer
from megatron.inference.request import Sampling
from megatron.inference.text_stream import TextStream, continuation_text
from megatron.model.layer_list import LayerStack
from megatron.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerateConfig:
    """Generation: checkpoint, prompts and sampling."""

    load: str | None = option(None)
    """Folder of checkpoints, or one checkpoint."""
    iteration: int | None = option(None, derived="the newest complete checkpoint")
    """Iteration of the checkpoint."""
    prompt: str | None = option(None)
    """Text to continue; an empty one starts a new document."""
    prompt_file: str | None = option(None)
    """File with a prompt per line; in a .jsonl file each line is {"prompt": "..."}."""
    max_new_tokens: int = option(128)
    """Maximum number of tokens to add to a prompt."""
    temperature: float | None = option(None, derived="1.0")
    """Divisor of the logits: lower values are more deterministic, higher values more random."""
    top_k: int | None = option(None, derived="0, all tokens")
    """Draw among this number of most probable tokens."""
    top_p: float | None = option(None, derived="1.0, all tokens")
    """Draw among the fewest tokens whose probabilities sum to at least this."""
    greedy: bool = option(False)
    """Always choose the most probable token."""
    seed: int = option(1234)
    """Seed of the draws."""
    num_samples: int = option(1)
    """Texts per prompt."""
    batch_size: int = option(8)
    """Maximum number of prompts (of equal length) in the model at a time."""
    output: str | None = option(None)
    """JSON-lines file for the texts; they are printed if it is not given."""

    def check(self) -> None:
        if self.load is None:
            raise ConfigError("--load is missing")
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("--prompt and --prompt-file: give one of them")
        if self.output is not None and self.prompt is None and self.prompt_file is None:
            raise ConfigError("--output needs --prompt or --prompt-file")
        for flag in ("max_new_tokens", "num_samples", "batch_size"):
            if getattr(self, flag) < 1:
                name = flag.replace("_", "-")
                raise ConfigError(f"--{name} {getattr(self, flag)} must be positive")
        drawn = [f for f in ("temperature", "top_k", "top_p") if getattr(self, f) is not None]
        if self.greedy and drawn:
            name = drawn[0].replace("_", "-")
            raise ConfigError(f"--greedy does not sample; remove it or --{name}")
        if self.greedy and self.num_samples > 1:
            raise ConfigError(f"--num-samples {self.num_samples} --greedy: all would be equal")

    def sampling(self) -> Sampling:
        return Sampling(
            greedy=self.greedy,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=self.seed,
        )


@dataclass(frozen=True)
class Program:
    """A loaded model with its tokenizer and the user's choices."""

    options: GenerateConfig
    model: LayerStack
    config: ModelConfig
    tokenizer: Tokenizer
    eod: int | None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt; an empty one starts a new document."""
        ids = self.tokenizer.tokenize(text)
        return ids or [self.tokenizer.eod]

    def continuations(
        self, prompts: Sequence[list[int]], on_token: OnToken | None = None
    ) -> list[Continuation]:
        return generate(
            self.model,
            self.config,
            prompts,
            self.options.max_new_tokens,
            self.options.sampling(),
            self.eod,
            self.options.batch_size,
            on_token,
        )


def main(argv: Sequence[str] | None = None) -> None:
    (options,) = parse_configs((GenerateConfig,), argv, description=__doc__)
    try:
        run(options)
    except (ValueError, OSError) as error:
        sys.exit(f"generate.py: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def run(options: GenerateConfig) -> None:
    options.check()
    options.sampling()
    texts = read_prompts(options)
    iteration = None if options.iteration is None else str(options.iteration)
    source = open_checkpoint(options.load or "", iteration)
    model, config = load_model(source)
    tokenizer = load_tokenizer(config, source.folder)
    program = Program(options, model, config.model, tokenizer, eod_of(tokenizer))
    if texts is None:
        interact(program)
    elif options.output is None:
        show(program, texts)
    else:
        write(program, texts, Path(options.output))


def eod_of(tokenizer: Tokenizer) -> int | None:
    """The end-of-document token, if the vocabulary has one."""
    try:
        return tokenizer.eod
    except ValueError:
        return None


def read_prompts(options: GenerateConfig) -> list[str] | None:
    """The prompts of the flags; None without any."""
    if options.prompt is not None:
        return [options.prompt]
    if options.prompt_file is None:
        return None
    path = Path(options.prompt_file)
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {path} is not UTF-8 text: {error}") from None
    if path.suffix == ".jsonl":
        lines = [json_prompt(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not lines:
        raise ValueError(f"--prompt-file {path} has no prompt")
    return lines


def json_prompt(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (json.JSONDecodeError, KeyError, TypeError):
        prompt = None
    if not isinstance(prompt, str):
        raise ValueError(
            f'--prompt-file {path}, line {number} is not of the form {{"prompt": "..."}}'
        )
    return prompt


def interact(program: Program) -> None:
    """Continues one line after another until the line "stop" or the end of the input."""
    for number in itertools.count():
        try:
            text = input("Context prompt (stop to exit) >>> ")
        except EOFError:
            print()
            return
        if text.strip() == "stop":
            return
        # A repeated prompt gives another text.
        options = dataclasses.replace(program.options, seed=program.options.seed + number)
        try:
            show(dataclasses.replace(program, options=options), [text])
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)


def show(program: Program, texts: Sequence[str]) -> None:
    """Prints all texts; a single one while it is generated."""
    if len(texts) * program.options.num_samples > 1:
        for record in records(program, texts):
            print(f"{record['prompt']}{record['text']}\n{'-' * 8}")
        return
    prompt = program.encode(texts[0])
    stream = TextStream(program.tokenizer, prompt)
    print(texts[0], end="", flush=True)
    program.continuations(
        [prompt], on_token=lambda _, token: print(stream.add(token), end="", flush=True)
    )
    print(stream.close())


def write(program: Program, texts: Sequence[str], path: Path) -> None:
    """Writes all texts as JSON lines."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records(program, texts)]
    write_text(path, "".join(lines))
    print(f"{path}: {len(lines)} texts")


def records(program: Program, texts: Sequence[str]) -> list[dict[str, Any]]:
    """A record for each sample of each prompt."""
    numbered = [(text, sample) for text in texts for sample in range(program.options.num_samples)]
    prompts = [program.encode(text) for text, _ in numbered]
    found = program.continuations(prompts)
    return [
        {
            "prompt": text,
            "sample": sample,
            "text": continuation_text(program.tokenizer, prompt, continuation.tokens),
            "tokens": continuation.tokens,
            "ended": continuation.ended,
        }
        for (text, sample), prompt, continuation in zip(numbered, prompts, found, strict=True)
    ]


if __name__ == "__main__":
    main()
