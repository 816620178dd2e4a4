"""The prompts that a model in training answers, and the tokens at which its answers end."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.apps.finetune.config import TuningConfig
from megatron.checkpoint.generation_settings import ends_of, for_tokenizer
from megatron.checkpoint.source import open_checkpoint
from megatron.config import ConfigError
from megatron.data.loader import TrainingData
from megatron.data.samples import PackedSample, SampleDataset
from megatron.features.instruction.columns import RecordColumns
from megatron.features.instruction.conversations import (
    ANSWER,
    Example,
    Turn,
    read_examples,
)
from megatron.features.instruction.example_checks import answer_ends
from megatron.features.instruction.example_encoder import ExampleEncoder
from megatron.features.instruction.flags import InstructionConfig
from megatron.features.instruction.record_files import ENDINGS
from megatron.features.preference.batch import PreferenceSample
from megatron.features.preference.flags import PreferenceConfig
from megatron.run.run import Run


class PromptTokens(NamedTuple):
    """A prompt, and the answer that the data have; () if they have none."""

    prompt: tuple[int, ...]
    reference: tuple[int, ...] = ()


class Prompts(NamedTuple):
    """The prompts that the model in training answers, and the tokens that end an answer."""

    prompts: tuple[PromptTokens, ...]
    ends: frozenset[int]


def sample_prompts(config: TuningConfig, run: Run, data: TrainingData) -> Prompts:
    """Those of ``--sample-prompts``, or of held-out examples, or, where nothing is held out, of
    examples of the training. Raises ConfigError or OSError if the file cannot be used."""
    datasets = data.datasets
    assert datasets.train is not None
    if run.config.section(PreferenceConfig).preference == "reward":
        return Prompts((), frozenset())
    held_out = next(iter(datasets.valid.values()), datasets.train)
    if config.sample_prompts is not None:
        found = prompts_of_file(config.sample_prompts, config.samples, run)
    else:
        found = held_out_prompts(held_out, config.samples)
    room = run.config.model.positions.max_position_embeddings - config.sample_tokens
    if found and room < 1:
        raise ConfigError(
            f"--sample-tokens {config.sample_tokens} leaves no room for a prompt in the "
            f"{run.config.model.positions.max_position_embeddings} positions of the model"
        )
    short = (each._replace(prompt=each.prompt[-room:]) for each in found)
    source = open_checkpoint(config.model or "", verify=False)
    base = for_tokenizer(source.generation, source.tokenizer, run.config.tokenizer, run.tokenizer)
    return Prompts(tuple(short), answer_ends(datasets.train, run.tokenizer, ends_of(base)))


def held_out_prompts(dataset: SampleDataset[Any], count: int) -> list[PromptTokens]:
    """Those of the first samples, one of each sample, with the better of two answers."""
    found = (prompt_of(dataset[number]) for number in range(min(count, len(dataset))))
    return [prompt for prompt in found if prompt is not None]


def prompt_of(sample: Any) -> PromptTokens | None:
    """The first prompt of a sample; None without one."""
    if isinstance(sample, PreferenceSample):
        row = sample.rows[0]
        return PromptTokens(tuple(row.context.tolist()), tuple(row.continuation.tolist()))
    return first_answer(sample) if isinstance(sample, PackedSample) else None


def first_answer(sample: PackedSample) -> PromptTokens | None:
    """Up to the first answer of the first example in a sample; None where nothing precedes it."""
    own = sample.document_ids_S == sample.document_ids_S[0]
    counted = np.append(False, sample.loss_mask_S > 0) & np.append(True, own)
    if not counted.any():
        return None
    start = int(counted.argmax())
    after = np.flatnonzero(~counted[start:])
    stop = start + int(after[0]) if len(after) else len(counted)
    tokens = sample.tokens_T.tolist()
    return PromptTokens(tuple(tokens[:start]), tuple(tokens[start:stop]))


def prompts_of_file(path: str, count: int, run: Run) -> list[PromptTokens]:
    """Those of a file of examples, or of text, a prompt on each line, in the format of the run's
    data. Raises ConfigError or OSError if it cannot be used."""
    flag = f"--sample-prompts {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{flag}: there is no such file")
    if path.endswith(ENDINGS):
        columns = RecordColumns.of(run.config.section(InstructionConfig))
        examples = [example for _, example in read_examples(path, columns)]
    else:
        lines = Path(path).read_text("utf-8").splitlines()
        examples = [_asked(line) for line in lines if line.strip()]
    if not examples:
        raise ConfigError(f"{flag}: it has no prompt")
    instructions = run.config.section(InstructionConfig)
    encoder = ExampleEncoder(instructions, run.tokenizer, run.config.tokenizer)
    encoded = encoder([(flag, example) for example in examples[:count]])
    return [_prompt(each.tokens, each.counted) for each in encoded]


def _asked(line: str) -> Example:
    # An answer shows where the prompt ends.
    return Example((Turn("user", line), Turn(ANSWER, "-")))


def _prompt(tokens: npt.NDArray[np.int32], counted: npt.NDArray[np.bool_]) -> PromptTokens:
    start = int(counted.argmax()) if counted.any() else len(tokens)
    return PromptTokens(tuple(tokens[:start].tolist()))
