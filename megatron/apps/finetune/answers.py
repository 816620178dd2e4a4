"""Answers to prompts by the model being trained, generated at every evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.apps.finetune.settings import TuningConfig
from megatron.apps.generation.execution.runner import step_group
from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.writing import TextWriter, training_runner
from megatron.apps.reinforcement.data.prompts import PromptSample
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError
from megatron.data.loader import TrainingData
from megatron.data.samples import PackedSample
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import ANSWER, Example, Turn, read_examples
from megatron.features.instruction.example_checks import answer_ends
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import ENDINGS
from megatron.features.preference.flags import PreferenceConfig
from megatron.features.preference.samples import PreferenceSample
from megatron.formats.generation_settings import ends_of, for_tokenizer
from megatron.parallel.mesh import Mesh
from megatron.run.run import Run
from megatron.training.registry import WrittenText, WrittenTexts
from megatron.training.report import say
from megatron.training.trainer import Callback, Trainer


class PromptTokens(NamedTuple):
    """Token ids of a prompt, and of its answer in the data (empty if the data contain none)."""

    prompt: tuple[int, ...]
    reference: tuple[int, ...] = ()


class Prompts(NamedTuple):
    """Prompts for the model being trained, and the end tokens and maximum length of its answers."""

    prompts: tuple[PromptTokens, ...]
    ends: frozenset[int] = frozenset()
    tokens: int = 1


def sample_prompts(config: TuningConfig, run: Run, data: TrainingData) -> Prompts:
    """Return the prompts of ``--sample-prompts``, by default of held-out examples, or of training
    examples if none are held out. Raises ConfigError or OSError if the file cannot be used."""
    datasets = data.datasets
    assert datasets.train is not None
    if run.config.section(PreferenceConfig).preference == "reward":
        return Prompts(())
    held_out = next(iter(datasets.valid.values()), datasets.train)
    if config.sample_prompts is not None:
        prompts = prompts_of_file(config.sample_prompts, config.samples, run)
    else:
        count = min(config.samples, len(held_out))
        samples = (prompt_of(held_out[number]) for number in range(count))
        prompts = [prompt for prompt in samples if prompt is not None]
    positions = run.config.model.positions.max_position_embeddings
    tokens = answer_tokens(config, positions) if prompts else 1
    short = (each._replace(prompt=each.prompt[tokens - positions :]) for each in prompts)
    source = open_checkpoint(config.model or "", verify=False)
    base = for_tokenizer(source.generation, source.tokenizer, run.config.tokenizer, run.tokenizer)
    ends = answer_ends(datasets.train, run.tokenizer, ends_of(base))
    return Prompts(tuple(short), ends, tokens)


def answer_tokens(config: TuningConfig, positions: int) -> int:
    """Return the maximum number of tokens in an answer for a model with ``positions`` positions.
    Raises ConfigError if ``--sample-tokens`` leaves no room for a prompt."""
    tokens = config.sample_tokens or min(128, positions // 2)
    if tokens >= positions:
        raise ConfigError(
            f"--sample-tokens {tokens} leaves no room for a prompt in the {positions} positions of "
            f"the model; give fewer than {positions}, or --samples 0"
        )
    return tokens


def prompt_of(sample: Any) -> PromptTokens | None:
    """Return a sample's first prompt with its answer (the chosen one of two), or None."""
    if isinstance(sample, PromptSample):
        return PromptTokens(tuple(sample.prompt.tokens.tolist()))
    if isinstance(sample, PreferenceSample):
        row = sample.rows[0]
        return PromptTokens(tuple(row.context.tolist()), tuple(row.continuation.tolist()))
    if not isinstance(sample, PackedSample):
        return None
    first = sample.document_ids_S == sample.document_ids_S[0]
    counted = np.append(False, sample.loss_mask_S > 0) & np.append(True, first)
    if not counted.any():
        return None
    start = int(counted.argmax())
    after = np.flatnonzero(~counted[start:])
    stop = start + int(after[0]) if len(after) else len(counted)
    tokens = sample.tokens_T.tolist()
    return PromptTokens(tuple(tokens[:start]), tuple(tokens[start:stop]))


def prompts_of_file(path: str, count: int, run: Run) -> list[PromptTokens]:
    """Return the first ``count`` prompts of a file of examples, or of a text file with one per
    line, in the format of the run's data. Raises ConfigError or OSError if the file is unusable."""
    flag = f"--sample-prompts {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{flag}: there is no such file")
    if path.endswith(ENDINGS):
        columns = RecordColumns.of(run.config.section(InstructionConfig))
        examples = [example for _, example in read_examples(path, columns)]
    else:
        lines = Path(path).read_text("utf-8").splitlines()
        # A dummy answer marks the end of the prompt.
        examples = [
            Example((Turn("user", line), Turn(ANSWER, "-"))) for line in lines if line.strip()
        ]
    if not examples:
        raise ConfigError(f"{flag}: it has no prompt")
    instructions = run.config.section(InstructionConfig)
    encoder = ExampleEncoder(instructions, run.tokenizer, run.config.tokenizer)
    prompts = []
    for each in encoder([(flag, example) for example in examples[:count]]):
        start = int(each.counted.argmax()) if each.counted.any() else len(each.tokens)
        prompts.append(PromptTokens(tuple(each.tokens[:start].tolist())))
    return prompts


class Baseline(Callback):
    """Callback that evaluates the model before the first step."""

    def before_step(self, trainer: Trainer) -> None:
        if trainer.iteration == 0:
            trainer.evaluate()


_MOST_SHOWN = 60
"""Maximum number of characters of a prompt or answer on the console."""


def shown(text: WrittenText) -> str:
    """Shorten a prompt and its answer for the console. The metrics contain the full text."""
    ended = "" if text.ended else " (not ended)"
    return f"prompt: {_short(text.prompt, at_end=True)} | answer: {_short(text.answer)}{ended}"


def _short(text: str, at_end: bool = False) -> str:
    """Quote text on one line. Long text keeps only its beginning or, ``at_end``, its end."""
    if len(text) > _MOST_SHOWN:
        text = f"...{text[-_MOST_SHOWN:]}" if at_end else f"{text[:_MOST_SHOWN]}..."
    return repr(text)


class SampleTexts(Callback):
    """Callback with which the model answers prompts at every evaluation, by greedy decoding."""

    def __init__(self, run: Run, mesh: Mesh, prompts: Prompts) -> None:
        self._tokenizer, self._mesh, self._prompts = run.tokenizer, mesh, prompts.prompts
        self._ends, stopping = prompts.ends, StopRules(prompts.tokens, prompts.ends)
        self._requests = [
            GenerationRequest(each.prompt, stopping, Sampling(greedy=True))
            for each in self._prompts
        ]
        longest = max((len(each.prompt) for each in self._prompts), default=0)
        self._longest = longest + prompts.tokens
        self._steps = step_group(mesh) if self._requests else None
        self._written_at: int | None = None

    def evaluate(self, trainer: Trainer, last: bool) -> None:
        """Generate and show the answers if an evaluation is due."""
        due = last or trainer.plan.evaluates_after(trainer.iteration)
        if not due or not self._requests or self._written_at == trainer.iteration:
            return
        self._written_at = trainer.iteration
        trainer.settle()
        engine, tokenizer = trainer.engine, self._tokenizer
        count, longest = len(self._requests), self._longest
        with training_runner(engine, tokenizer, count, longest, self._steps) as runner:
            # At ZeRO 3, the forward pass of one replica needs the other replicas' weights.
            writer = TextWriter(self._mesh, tokenizer, runner, together=engine.stage == 3)
            completions = writer.completions(self._requests)
        texts = tuple(
            WrittenText(
                self._text(each.prompt, special=True),
                self._text(completion.tokens),
                self._text(each.reference),
                completion.finish == "stop",
            )
            for each, completion in zip(self._prompts, completions, strict=True)
        )
        if trainer.at_end and self._mesh.world.rank == 0:
            first = shown(texts[0])
            say(f"sample 1 of {len(texts)} at iteration {trainer.iteration} | {first}")
        trainer.show(WrittenTexts(trainer.iteration, texts))

    def _text(self, tokens: Sequence[int], special: bool = False) -> str:
        """Return the text of token ids, without ids that the tokenizer lacks. Tokens that end an
        answer are only included with ``special``."""
        shown = [token for token in tokens if special or token not in self._ends]
        known = [token for token in shown if token < self._tokenizer.vocab_size]
        return self._tokenizer.detokenize(known)
