"""Runs the commands of the documentation: small, on this machine, as a reader would type them.

What trains gets :data:`SMALLER` appended: of a flag that comes twice the last one counts, so the
command is run as it is written but for the size of the model and the length of the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from doc_pages import ROOT, Block
from setup_arguments import setup_arguments
from stem import SETTINGS, Forked, shared

from megatron.util.errors import path_of

RUN = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --train-iters 4 "
    "--micro-batch-size 1 --global-batch-size 4 --save-interval 2 --eval-interval 4 "
    "--eval-iters 1 --log-interval 1 --lr-warmup-iters 1 --num-workers 0 --peak-tflops 1"
)
"""Flags of a run that is over in a second."""

RUN_OF_T5 = RUN.replace(
    "--seq-length 32",
    "--encoder-seq-length 32 --decoder-seq-length 32 --kv-channels 8 --ffn-hidden-size 64",
)
"""The same for a T5, which has two lengths."""

RUN_OF_RETRO = RUN.replace(" --lr-warmup-iters 1", "")
"""The same for a Retro, whose length is that of its project, in samples."""

MODEL = "--num-layers --hidden-size --num-attention-heads --seq-length".split()
"""Of these flags, those that a checkpoint says with --use-checkpoint-args."""

SMALLER = {
    "pretrain_gpt.py": RUN,
    "pretrain_bert.py": RUN,
    "pretrain_t5.py": RUN_OF_T5,
    "pretrain_retro.py": RUN_OF_RETRO,
    "finetune.py": "--seq-length 192 --max-position-embeddings 192 --train-iters 2 "
    "--micro-batch-size 1 --global-batch-size 2 --eval-interval 2 --samples 1 --sample-tokens 4 "
    "--log-interval 1 --num-workers 0 --peak-tflops 1",
    "finetune_llama.py": f"{RUN} --seq-length 192 --max-position-embeddings 192",
    "tools/profile_step.py": RUN,
    "tools/build_index.py": f"{RUN} --workers 1",
    "tools/show_batch.py": RUN,
    "tools/analyze_data.py": RUN,
    "tools/preprocess_data.py": "--workers 1",
    "tools/retro/preprocess_data.py": "--seq-length 32 --retro-gpt-chunk-length 8 "
    "--train-samples 16 --global-batch-size 4 --eval-interval 4 --eval-iters 1",
    "tools/train_tokenizer.py": "--vocab-size 300",
    "tools/generate.py": "--max-new-tokens 8",
    "tasks/main.py": "--num-workers 0 --peak-tflops 1 --log-interval 1",
}
"""What is appended to the commands of each program."""

LINKS = (
    "tools",
    "tasks",
    "deepspeed_configs",
    "examples_deepspeed",
    "scripts",
    "benchmarks",
    "pretrain_gpt.py",
    "pretrain_bert.py",
    "pretrain_t5.py",
    "pretrain_retro.py",
    "finetune.py",
    "finetune_llama.py",
)
"""What the commands find of the repository in their folder."""

BIN = Path(sys.executable).parent
"""The commands of the environment."""

PATIENCE = 240.0
"""Seconds that a command may take."""


@dataclass
class Command:
    """A command of a block.

    Attributes:
        text: as it is written, on one line.
        words: what follows the program.
        program: file of the program in the repository, or None for other commands.
        processes: how many a launcher starts.
        environment: assignments in front of it.
        may_fail: whether any exit status will do.
    """

    text: str
    words: list[str] = field(default_factory=list)
    program: str | None = None
    processes: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    may_fail: bool = False


def commands(block: Block) -> list[Command]:
    """The commands of a block, with continued lines joined and comments left out."""
    lines = re.sub(r"\\\n\s*", "", block.text).splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        if words:
            found.append(understood(line.strip(), words))
    return found


def understood(line: str, words: Sequence[str]) -> Command:
    """Finds the program of a command, behind its launcher."""
    words = list(words)
    if words[-2:] == ["||", "true"]:  # whatever its status
        return replace(understood(line, words[:-2]), may_fail=True)
    command = Command(line)
    while words and re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        command.environment[name] = value
    place = next((i for i, w in enumerate(words) if _program(w)), None)
    if place is None or any(word in ("|", ">", "&&", ";") for word in words):
        return command
    command.program = _program(words[place])
    for flag, value in zip(words[:place], words[1:place], strict=False):
        if flag in ("--num_gpus", "--nproc-per-node") and value.isdigit():
            command.processes = int(value)
    command.words = words[place + 1 :]
    if "--num-gpus-per-node" in command.words:  # started for real in tests/e2e/test_launch.py
        command.processes = int(command.words[command.words.index("--num-gpus-per-node") + 1])
    return command


def _program(word: str) -> str | None:
    """The file in the repository that a word of a command names as a program."""
    scripts = console_scripts()
    if word in scripts:
        return scripts[word]
    ours = re.match(
        r"(tools|tasks|benchmarks|examples_deepspeed|scripts)/.*\.(py|sh|sbatch)$|\w+\.py$", word
    )
    if ours and (ROOT / word).is_file():
        return word
    return None


def console_scripts() -> dict[str, str]:
    """Files of the installed commands, by name."""
    scripts = (line.split(" = ") for line in setup_arguments()["entry_points"]["console_scripts"])
    return {name: path_of(at.removesuffix(":main")) for name, at in scripts}


def smaller(command: Command, extra: str) -> list[str]:
    """The words of a command, with those that make it small appended."""
    assert command.program is not None
    if extra == "nothing" or "--help" in command.words:
        return command.words
    added = shlex.split(SMALLER.get(command.program, ""))
    left_out = {"--save-interval"} if "--save" not in command.words else set()
    left_out |= set(MODEL) if "--use-checkpoint-args" in command.words else set()
    pairs = zip(added[::2], added[1::2], strict=True)
    added = [word for pair in pairs for word in pair if pair[0] not in left_out]
    trains = "--train-iters" in added
    return [*command.words, *added, *(shlex.split(extra) if trains else ())]


class Programs:
    """The process that programs are forked from, started when it is first needed."""

    def __init__(self) -> None:
        self._process: Forked | None = None

    def _started(self) -> Forked:
        if self._process is None:
            environment = os.environ | {
                **SETTINGS,
                "TOKENIZERS_PARALLELISM": "false",
                "COLUMNS": "100",
                "PYTHONPATH": f"{ROOT}:{ROOT / 'compat'}:{Path(__file__).parent}",
            }
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                environment.pop(name, None)
            self._process = shared().start("warm_programs", "serve", environment=environment)
        return self._process

    def run(
        self, file: str, words: Sequence[str], folder: Path, processes: int = 1, **settings: str
    ) -> tuple[int, str]:
        """Runs a program; returns its exit status and what the first process printed."""
        output = folder / ".output"
        statuses = self._told(file, words, folder, output, processes, settings)
        return max(statuses, key=abs), output.read_text()

    @contextlib.contextmanager
    def serving(
        self, file: str, words: Sequence[str], folder: Path, **settings: str
    ) -> Iterator[None]:
        """A server that runs until the block ends; SIGTERM ends it. Raises AssertionError if it
        does not print that it serves, or ends with an error."""
        output = folder / ".server-output"
        served = self._told(file, words, folder, output, 1, settings, serves=True)
        try:
            deadline = time.monotonic() + PATIENCE
            while not (output.is_file() and " is served at http" in output.read_text()):
                assert time.monotonic() < deadline and psutil.pid_exists(served[0]), (
                    f"the server does not serve: {output.read_text()}"
                )
                assert psutil.Process(served[0]).status() != psutil.STATUS_ZOMBIE, (
                    output.read_text()
                )
                time.sleep(0.05)
            yield
        finally:
            statuses = self._answer({"stop": served})
        assert statuses == [0], output.read_text()

    def _told(
        self,
        file: str,
        words: Sequence[str],
        folder: Path,
        output: Path,
        processes: int,
        settings: dict[str, str],
        serves: bool = False,
    ) -> list[int]:
        """Starts a program; returns the exit statuses of its processes or, of a server, their
        ids."""
        environments: list[dict[str, str]] = [dict(settings)]
        if processes > 1:
            size = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
            size["MASTER_PORT"] = free_port()
            environments = [
                settings | size | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(processes)
            ]
        job = {
            "file": file,
            "argv": list(words),
            "folder": str(folder),
            "output": str(output),
            "environments": environments,
            "serves": serves,
        }
        return self._answer(job)

    def _answer(self, job: dict[str, Any]) -> list[int]:
        pipe = self._started().pipe
        pipe.send(job)
        return pipe.recv()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.pipe.close()
            self._process.join()


def free_port() -> str:
    """A port that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def execute(
    command: Command, folder: Path, programs: Programs, environment: dict[str, str], extra: str
) -> tuple[int, str]:
    """Runs a command; returns its exit status and what it printed.

    Args:
        command: the command.
        folder: where.
        programs: runs those of the project.
        environment: what the page has exported so far; an export adds to it.
        extra: appended to commands that train.
    """
    words = shlex.split(command.text, comments=True)
    if words[0] == "export":
        environment |= dict(word.split("=", 1) for word in words[1:])
        return 0, ""
    if words[0] in (".", "source"):  # the environment that the tests run in
        return 0, ""
    settings = environment | command.environment
    if command.program is None:
        return _shell(["bash", "-c", command.text], folder, settings)
    if command.program.endswith(".py"):
        return programs.run(
            command.program, smaller(command, extra), folder, command.processes, **settings
        )
    script = ["bash", command.program, *command.words]
    status, shown = _shell(script, folder, settings | {"DRY_RUN": "1"})
    if status or "DRY_RUN" in settings:
        return status, shown
    # The scripts go to the repository's folder; what they print is run here.
    return execute(understood(shown, shlex.split(shown)), folder, programs, environment, extra)


def _shell(words: Sequence[str], folder: Path, settings: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        words,
        cwd=folder,
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"} | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout


def prose(seed: int, sentences: int) -> str:
    """Made-up English."""
    rng = random.Random(seed)
    nouns = "bridge river town house winter garden school market forest letter road".split()
    verbs = "crossed watched built painted remembered visited measured described".split()
    return " ".join(
        f"In {rng.randrange(1000, 10000)} they {rng.choice(verbs)} the {rng.choice(nouns)} "
        f"near the {rng.choice(nouns)}."
        for _ in range(sentences)
    )


def prepare(folder: Path, programs: Programs) -> None:
    """Makes everything that a page may name by ``prepare``, each in a folder of its own."""
    text = folder / "text"
    for name, seed in (("corpus/a.jsonl", 0), ("corpus/b.jsonl", 100), ("books.jsonl", 200)):
        path = text / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": prose(seed + i, 12)}) + "\n" for i in range(20))
        path.write_text("".join(lines))
    (text / "more").mkdir()
    (text / "more" / "articles.txt").write_text("\n\n".join(prose(300 + i, 6) for i in range(9)))
    examples = [
        {"instruction": f"Name a planet, number {i}.", "input": "", "output": "Mars."}
        for i in range(24)
    ]
    (text / "alpaca.json").write_text(json.dumps(examples))
    pairs = [
        {"prompt": f"Planet {i}?", "chosen": " Mars.", "rejected": " Moon."} for i in range(24)
    ]
    judged = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in pairs
        for name in ("chosen", "rejected")
    ]
    for name, records in (("pairs", pairs), ("judged", judged)):
        (text / f"{name}.json").write_text(json.dumps(records))

    (folder / "tokenizer").mkdir()
    _must(
        programs.run(
            str(ROOT / "tools/train_tokenizer.py"),
            ["--input", str(text / "corpus"), "--vocab-size", "300", "--output", "made"],
            folder / "tokenizer",
        )
    )
    made = folder / "tokenizer" / "made"
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(made / name, folder / "tokenizer" / name)
    shutil.rmtree(made)
    gpt2 = "--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt"

    for prefix in ("corpus", "books", "code", "web"):
        work = folder / "data"
        (work / "data").mkdir(parents=True, exist_ok=True)
        for name in ("vocab.json", "merges.txt"):
            shutil.copy(folder / "tokenizer" / name, work / name)
        _must(
            programs.run(
                str(ROOT / "tools/preprocess_data.py"),
                f"--input {text}/corpus --output-prefix data/{prefix} --append-eod "
                f"--workers 1 {gpt2}".split(),
                work,
            )
        )

    work = folder / "checkpoints"
    shutil.copytree(folder / "data", work)
    _must(
        programs.run(
            str(ROOT / "pretrain_gpt.py"),
            f"{RUN} {gpt2} --data-path data/corpus_text_document --lr 1e-3 --save checkpoints "
            "--use-rotary-position-embeddings --normalization RMSNorm --swiglu "
            "--disable-bias-linear --untie-embeddings-and-output-weights "
            "--attention-dropout 0 --hidden-dropout 0".split(),
            work,
        )
    )

    evaluation_files(folder / "evaluation")
    (folder / "bert").mkdir()
    bert(folder / "bert", programs, text / "corpus")

    work = folder / "hf"
    work.mkdir()
    _must(
        programs.run(
            str(ROOT / "tools/convert_checkpoint.py"),
            f"to-hf --load {folder}/checkpoints/checkpoints --output Qwen2.5-0.5B".split(),
            work,
        )
    )


def evaluation_files(folder: Path) -> None:
    """Small files of the form that evaluation tasks read."""
    rows = [[prose(500 + i, 1), prose(600 + i, 1)] for i in range(16)]
    labels = ["contradiction", "entailment", "neutral"]
    first = "index promptID pairID genre parse1 parse2 parse3 parse4 sentence1 sentence2".split()
    for name, others in (("train", 1), ("dev_matched", 5), ("dev_mismatched", 5)):
        lines = [[*first, *(f"label{i + 1}" for i in range(others)), "gold_label"]]
        for number, row in enumerate(rows):
            lines.append([str(number), *"-------", *row, *[labels[number % 3]] * (others + 1)])
        _written(folder / "glue_data/MNLI" / f"{name}.tsv", map("\t".join, lines))
    question = {
        "article": prose(700, 2),
        "questions": ["What was near the _ ?", "Who wrote this?"],
        "options": [["river", "town", "house", "road"], ["I", "you", "she", "they"]],
        "answers": ["A", "D"],
    }
    for part in ("train/middle", "dev/middle", "dev/high"):
        _written(folder / "RACE" / part / "1.txt", [json.dumps(question)])
    texts = [json.dumps({"text": prose(800 + i, 1).removesuffix(".")}) for i in range(8)]
    for name in ("lambada_test.jsonl", "held-out.jsonl"):
        _written(folder / name, texts)
    _written(folder / "wikitext-103/wiki.test.tokens", [prose(900, 4).replace(".", " .")])


def _written(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def bert(folder: Path, programs: Programs, corpus: Path) -> None:
    """A vocabulary, and checkpoints of a BERT."""
    wordpiece = ["--tokenizer-type", "BertWordPieceLowerCase"]
    vocab = ["--vocab-file", "bert-vocab.txt"]
    for program, words in (
        ("train_tokenizer", ["--vocab-size", "300", "--output", "made"]),
        ("preprocess_data", ["--split-sentences", "--output-prefix", "text", "--workers", "1"]),
    ):
        words += ["--input", str(corpus), *wordpiece, *(vocab if "made" not in words else ())]
        _must(programs.run(str(ROOT / "tools" / f"{program}.py"), words, folder))
        if "made" in words:
            (folder / "made" / "vocab.txt").rename(folder / "bert-vocab.txt")
            shutil.rmtree(folder / "made")
    flags = f"{RUN} --seq-length 96 --train-iters 2 --lr 1e-3 --save checkpoints/bert"
    words = [*flags.split(), *vocab, "--data-path", "text_text_sentence"]
    _must(programs.run(str(ROOT / "pretrain_bert.py"), words, folder))


def _must(result: tuple[int, str]) -> None:
    assert result[0] == 0, result[1]


def fresh_folder(folder: Path, prepared: Path, wanted: str) -> Path:
    """Fills a folder with links to the repository and with what a page asks for."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    for word in wanted.split():
        assert (prepared / word).is_dir(), f"prepare: {word} is not known"
        shutil.copytree(prepared / word, folder, dirs_exist_ok=True)
    return folder


_NUMBER = re.compile(r"(?:\\[-+])?\d+(?:(?:\\\.|,)\d+)*(?:e\\?[-+]\d+)?")
"""A number in an escaped pattern."""


def matches(expected: Sequence[str], printed: str, numbers_vary: bool) -> bool:
    """Whether a page's output block describes what was printed."""
    pattern = []
    for line in expected:
        if line.strip() == "...":
            pattern.append(r"(?:.*\n)*?")
            continue
        text = re.escape(line.rstrip()).replace(r"\.\.\.", ".*?")
        if numbers_vary:
            text = re.sub(r"(?:\\ )+", r"\\s+", text)
            text = _NUMBER.sub(r"[-+\\d.,e]+", text)
        pattern.append(text + r"\s*\n")
    cleaned = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch("".join(pattern), cleaned) is not None
