"""Command-line program that prepares data for dialogue prompting: dialogue lines, examples of
knowledge and answers, and the input of the second stage.

Shape suffixes: N examples, D embedding dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.apps.msdp.dialogues import (
    NO_KNOWLEDGE,
    DialogueLine,
    internet_turns,
    read_lines,
    read_turns,
    response_examples,
    wikipedia_turns,
    with_knowledge,
    write_dataset,
    write_lines,
)
from megatron.config import ConfigError, Setting
from megatron.config.flags import nearest, option
from megatron.formats.conversion.commands import required
from megatron.util.processes import is_main_process
from megatron.util.progress import progress_bar, say

Embed = Callable[[Sequence[str]], npt.NDArray[np.floating]]
"""Function that returns the embeddings [N, D] of N texts."""
KNOWLEDGE_EXAMPLES, RESPONSE_EXAMPLES = 10, 20
DATA_TYPES = ("wow_seen", "wow_unseen", "woi")
_LONG_KNOWLEDGE = 20
_PRONOUNS = ("It", "it", "This", "this")
_BATCH, _TOKENS = 32, 512


@dataclass(frozen=True)
class PreprocessingConfig:
    """Data of dialogue prompting: the function to run, and its files."""

    func: str | None = option(None)
    """Function to run: process_wow_dataset, process_woi_dataset, get_knwl_gen_prompts,
    get_resp_gen_prompts or prepare_input."""
    raw_file: str | None = option(None, aliases=("--raw_file",))
    """File of the original dataset."""
    processed_file: str | None = option(None, aliases=("--processed_file",))
    """Output file."""
    knwl_ref_file: str | None = option(None, aliases=("--knwl_ref_file",))
    """Additional output file with only the knowledge."""
    resp_ref_file: str | None = option(None, aliases=("--resp_ref_file",))
    """Additional output file with only the answers, split into words."""
    knwl_gen_file: str | None = option(None, aliases=("--knwl_gen_file",))
    """File of generated knowledge, with one line for each line of --test_file."""
    test_file: str | None = option(None, aliases=("--test_file",))
    """File of dialogue lines to answer."""
    train_file: str | None = option(None, aliases=("--train_file",))
    """File of dialogue lines from which examples are chosen."""
    model_file: str | None = option(None, aliases=("--model_file",))
    """Folder of a question encoder: transformers' DPR, or a checkpoint of pretrain_ict.py."""
    data_type: str | None = option(None, aliases=("--data_type",), choices=DATA_TYPES)
    """Dataset from which --test_file was made."""
    seed: int = option(1234)
    """Random seed for the choice of examples."""


def run_preprocessing(config: PreprocessingConfig) -> None:
    """Run the function in ``--func``. Raises ConfigError if a flag or file cannot be used."""
    if config.func not in FUNCTIONS:
        hint = nearest(config.func or "", FUNCTIONS, "; the nearest is {}")
        raise ConfigError(f"--func {config.func}: the functions are {', '.join(FUNCTIONS)}{hint}")
    count = FUNCTIONS[config.func](config)
    if is_main_process():
        say(f"{config.func}: {count} lines in {config.processed_file}")


def _dataset(read: Callable[[str], list[DialogueLine]]) -> Callable[[PreprocessingConfig], int]:
    def write(config: PreprocessingConfig) -> int:
        lines, turns = required(config, "processed_file"), read(required(config, "raw_file"))
        write_dataset(turns, lines, config.knwl_ref_file, config.resp_ref_file)
        return len(turns)

    return write


def _responses(config: PreprocessingConfig) -> int:
    path = required(config, "processed_file")
    turns = read_turns("--train_file", required(config, "train_file"))
    write_lines(path, response_examples(turns, RESPONSE_EXAMPLES, config.seed))
    return RESPONSE_EXAMPLES


def _prepared(config: PreprocessingConfig) -> int:
    path = required(config, "processed_file")
    turns = read_turns("--test_file", required(config, "test_file"))
    knowledge = read_lines("--knwl_gen_file", required(config, "knwl_gen_file"))
    write_lines(path, ["\t".join(turn) for turn in with_knowledge(turns, knowledge)])
    return len(turns)


def _knowledge(config: PreprocessingConfig) -> int:
    path, kind = required(config, "processed_file"), required(config, "data_type")
    test = read_turns("--test_file", required(config, "test_file"))
    train = read_turns("--train_file", required(config, "train_file"))
    embed = question_encoder(required(config, "model_file"))
    rows = knowledge_examples(test, train, kind, embed)
    write_lines(path, [json.dumps(row) for row in rows])
    return len(rows)


FUNCTIONS: dict[str, Callable[[PreprocessingConfig], int]] = {
    "process_wow_dataset": _dataset(wikipedia_turns),
    "process_woi_dataset": _dataset(internet_turns),
    "get_knwl_gen_prompts": _knowledge,
    "get_resp_gen_prompts": _responses,
    "prepare_input": _prepared,
}
"""Functions by name. Each writes ``--processed_file`` and returns its number of lines."""


@dataclass(frozen=True)
class KnowledgeExample:
    """Candidate for an example. ``dialogue`` is the text to embed, ``shown`` the example as it
    appears in the model's prompt."""

    topic: str
    dialogue: str
    shown: str


def knowledge_examples(
    test: Sequence[DialogueLine], train: Sequence[DialogueLine], kind: str, embed: Embed
) -> list[dict[str, list[str]]]:
    """Return, for each line of ``test``, its key and at most :data:`KNOWLEDGE_EXAMPLES` examples
    from ``train``, the one with the most similar dialogue last. They have the line's topic. If no
    example has it, the most similar example of each other topic is used. Raises ConfigError if no
    line of ``train`` is suitable."""
    topics = {turn.topic for turn in test}
    every = _examples(train, topics, kind)
    if not every:
        raise ConfigError(
            f"--train_file has no line whose knowledge can be shown for --data_type {kind}"
        )
    vectors_ND = embed([example.dialogue for example in every])
    queries = [_dialogue(turn, named=True) for turn in test]
    similar = embed(queries) @ vectors_ND.T
    rows = []
    for turn, scores in progress_bar("choosing", list(zip(test, similar, strict=True)), len(test)):
        order = np.argsort(-scores, kind="stable").tolist()
        chosen = [number for number in order if every[number].topic == turn.topic]
        if not chosen:  # the most similar example of each topic
            of_topics = dict[str, int]()
            for number in order:
                of_topics.setdefault(every[number].topic, number)
            chosen = list(of_topics.values())
        shown = [every[number].shown for number in chosen[:KNOWLEDGE_EXAMPLES]]
        rows.append({turn.key: shown[::-1]})
    return rows


def _examples(train: Sequence[DialogueLine], topics: set[str], kind: str) -> list[KnowledgeExample]:
    """Return the examples from all suitable lines, by Megatron's criteria."""
    examples, seen = [], kind == "wow_seen"
    for turn in train:
        knowledge, topic = turn.knowledge, turn.topic
        if knowledge == NO_KNOWLEDGE:
            continue
        if not seen and ("(" in knowledge or ")" in knowledge or topic not in knowledge):
            continue
        if topic not in topics and (
            len(knowledge.split()) > _LONG_KNOWLEDGE or knowledge.startswith(_PRONOUNS)
        ):
            continue
        shown = f"( {turn.turns[-1]} ) {topic} => {knowledge}"
        examples.append(KnowledgeExample(topic, _dialogue(turn, named=not seen), shown))
    return examples


def _dialogue(turn: DialogueLine, named: bool) -> str:
    """Return the last turns of a dialogue as one text, preceded by the topic if ``named``."""
    return (f"( {turn.topic} ) " if named else "") + " ".join(turn.turns)


def question_encoder(path: str) -> Embed:
    """Load a folder's question encoder. Raises ConfigError if it is neither DPR nor a retriever."""
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"--model_file {path} is not a folder: name one of transformers' DPRQuestionEncoder, "
            "or a checkpoint of pretrain_ict.py"
        )
    if not (folder / "config.json").is_file():
        return _retriever(path)
    from transformers import AutoConfig, AutoTokenizer, DPRQuestionEncoder

    how: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    kind = AutoConfig.from_pretrained(folder, **how).model_type
    if kind != "dpr":
        raise ConfigError(f"--model_file {path} is a model of the type {kind}, and not dpr")
    tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    model = DPRQuestionEncoder.from_pretrained(folder, **how).eval()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)

    def embed(texts: Sequence[str]) -> npt.NDArray[np.floating]:
        parts = []
        for start in progress_bar("embedding", range(0, len(texts), _BATCH)):
            batch = tokenizer(
                list(texts[start : start + _BATCH]),
                padding=True, truncation=True, max_length=_TOKENS, return_tensors="pt",
            ).to(device)  # fmt: skip
            with torch.no_grad():
                parts.append(model(**batch).pooler_output.float().cpu().numpy())
        return np.concatenate(parts)

    return embed


def _retriever(path: str) -> Embed:
    """Load the query encoder from a retriever's checkpoint of this project, in this process."""
    from megatron.apps.tasks.retrieval.vectors import PassageEncoder, embed, opened_encoder
    from megatron.features.evaluation.checkpoints import (
        checkpoint_settings,
        evaluated_run,
        evaluation_settings,
    )
    from megatron.features.retrieval.flags import FAMILY
    from megatron.parallel.mesh import Mesh
    from megatron.training.resume import find_origin

    load = {"load": Setting(path, "flag --model_file")}
    settings = checkpoint_settings(load | {"torch_compile": Setting("off", "this program")})
    if settings["family"].value != FAMILY:
        raise ConfigError(
            f"--model_file {path} is a model of the family {settings['family'].value}: name a "
            "retriever's checkpoint, or transformers' DPRQuestionEncoder"
        )
    run = evaluated_run(evaluation_settings(settings)[0], processes=1)
    origin = find_origin(run.config.checkpoint)
    assert origin is not None
    encoder = PassageEncoder.of(run)

    def vectors(texts: Sequence[str]) -> npt.NDArray[np.floating]:
        with opened_encoder(run, Mesh(), origin.found, queries=True) as engine:
            embedded = embed(engine, texts, encoder.question, run.tokenizer.pad, _BATCH)
        return embedded.astype(np.float32)

    return vectors
