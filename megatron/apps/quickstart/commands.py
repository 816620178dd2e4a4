"""Commands of the quickstart, and a runner that repeats only those that have changed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.apps.quickstart.corpus import HeldOut
from megatron.util.digests import sha256, sha256_of_file
from megatron.util.errors import as_commands, commands
from megatron.util.files import write_whole

SPLIT, VOCAB_SIZE, SEQ_LENGTH, GLOBAL_BATCH_SIZE, EVALUATIONS = "97,3,0", 2048, 256, 8, 5
DEEPSPEED_CONFIG = Path("deepspeed_configs/ds_zero1.json")
PROMPT = "def read_file(path):\n"
# Argument that is replaced by a free port when its command starts.
FREE_PORT = "{free port}"

TOKENIZER = f"""python tools/train_tokenizer.py --input {{corpus}} --vocab-size {VOCAB_SIZE}
    --output {{tokenizer}}"""

TOKENIZER_FLAGS = """--tokenizer-type GPT2BPETokenizer
    --vocab-file {tokenizer}/vocab.json --merge-file {tokenizer}/merges.txt"""

DATA = f"""python tools/preprocess_data.py --input {{corpus}} --output-prefix {{folder}}/data/corpus
    {TOKENIZER_FLAGS} --append-eod"""

# A Llama with two million weights. The wide initialisation suits such a narrow network and short
# run: with the usual 0.02, the validation loss after 600 thousand tokens was 5.3 instead of 4.6.
TRAIN = f"""deepspeed --master_port {{port}} --num_gpus {{processes}}
    pretrain_gpt.py --deepspeed_config {DEEPSPEED_CONFIG}
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --use-rotary-position-embeddings
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.05 --seq-length {SEQ_LENGTH}
    --lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03
    --weight-decay 0.1 --adam-beta2 0.95
    --micro-batch-size {{micro_batch_size}} --global-batch-size {GLOBAL_BATCH_SIZE}
    --train-iters {{train_iters}} {TOKENIZER_FLAGS} --data-path {{prefix}} --split {SPLIT}
    --num-workers 0 --log-interval {{log_interval}} --eval-interval {{eval_interval}}
    --eval-iters {{eval_iters}} --save {{checkpoints}} --tensorboard-dir {{tensorboard}}
    --metrics-file {{metrics}}"""

STOP, RESUME = "--exit-interval {stop_after}", "--load {checkpoints}"

EXPORT = "python tools/convert_checkpoint.py to-hf --load {checkpoints} --output {hf}"

# This program does not import this project, just like programs of an exported model's users.
GENERATE = """\
from transformers import pipeline, set_seed
set_seed(1234)
generate = pipeline("text-generation", {folder})
text = generate({prompt}, max_new_tokens=100, do_sample=True, temperature=0.7, top_p=0.9)
print(text[0]["generated_text"])"""


class QuickstartFolder:
    """Paths of a quickstart's files, all in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stamps = folder, folder / ".stamps"
        self.corpus = folder / "data" / "corpus.jsonl"
        self.prefix = folder / "data" / "corpus_text_document"
        self.tokenizer, self.hf = folder / "tokenizer", folder / "hf"
        self.checkpoints, self.tensorboard = folder / "checkpoints", folder / "tensorboard"
        self.metrics, self.picture = folder / "metrics.jsonl", folder / "loss.png"

    def fill(self, template: str, **values: object) -> tuple[str, ...]:
        """Return the arguments of a command, with these paths and ``values`` filled in."""
        return tuple(word.format(**vars(self), **values) for word in template.split())


def in_checkout_folder() -> bool:
    """Return whether the current folder is a checkout, in which programs are started by path."""
    return Path("pretrain_gpt.py").is_file() and DEEPSPEED_CONFIG.is_file()


def installed(command: Command) -> Command:
    """Return a command that works without a checkout: with installed commands, and modules for
    launchers. A flag replaces DeepSpeed's JSON file, which the package does not contain."""
    text = shlex.join(command.words)
    text = text.replace(f"--deepspeed_config {DEEPSPEED_CONFIG}", "--zero-stage 1")
    words = tuple(shlex.split(as_commands(text, commands()))) if command.words[1] != "-c" else None
    return replace(command, words=words or command.words, reads=())


class CommandFailed(RuntimeError):
    """Raised if a command fails or does not write its results. The message names the command."""


@dataclass(frozen=True)
class Command:
    """A command as a user would type it.

    Attributes:
        name: name for messages and for the stamp file.
        reads: input files in addition to the results of earlier commands.
        makes: files or folders that it writes. A command without any always runs.
        continues: whether existing results are kept when the command runs again."""

    name: str
    words: tuple[str, ...]
    reads: tuple[Path, ...] = ()
    makes: tuple[Path, ...] = ()
    continues: bool = False


def data_commands(at: QuickstartFolder) -> list[Command]:
    files = tuple(at.prefix.with_name(at.prefix.name + end) for end in (".bin", ".idx"))
    return [
        Command("tokenizer", at.fill(TOKENIZER), makes=(at.tokenizer,)),
        Command("data", at.fill(DATA), makes=files),
    ]


def training_commands(at: QuickstartFolder, train_iters: int, reference: HeldOut) -> list[Command]:
    """Return the commands from tokens to generated text. Training stops and resumes in the middle,
    and each evaluation reads the whole validation split."""
    # Use two data-parallel processes, unless there is exactly one GPU, which they cannot share.
    processes = 1 if torch.cuda.device_count() == 1 else 2
    train = at.fill(
        TRAIN,
        port=FREE_PORT,
        processes=processes,
        micro_batch_size=GLOBAL_BATCH_SIZE // processes,
        train_iters=train_iters,
        log_interval=max(1, train_iters // 64),
        eval_interval=max(1, train_iters // EVALUATIONS),
        eval_iters=max(1, reference.tokens // (GLOBAL_BATCH_SIZE * SEQ_LENGTH)),
    )
    program = GENERATE.format(folder=json.dumps(str(at.hf)), prompt=json.dumps(PROMPT))
    return [
        Command(
            "train",
            train + at.fill(STOP, stop_after=train_iters // 2),
            reads=(DEEPSPEED_CONFIG,),
            makes=(at.checkpoints, at.metrics, at.tensorboard),
        ),
        Command(
            "resume",
            train + at.fill(RESUME),
            makes=(at.checkpoints / f"global_step{train_iters}",),
            continues=True,
        ),
        Command("export", at.fill(EXPORT), makes=(at.hf,)),
        Command("generate", ("python", "-c", program)),
    ]


class CommandChain:
    """Runs commands in order, and skips those whose results are up to date. A command's stamp is a
    hash of its arguments, of the files that it reads, and of the previous stamp, initially
    ``start``. After a change, only the affected command and those after it run again."""

    def __init__(self, stamps: Path, start: str) -> None:
        self._stamps, self._previous = stamps, start
        stamps.mkdir(parents=True, exist_ok=True)

    def run(self, command: Command) -> bool:
        """Run ``command`` unless it is up to date. Return whether it ran. Raises CommandFailed if
        it fails or its results are missing."""
        read = [sha256_of_file(path) for path in command.reads]
        self._previous = digest = sha256(json.dumps([self._previous, command.words, read]))
        stamp = self._stamps / command.name
        done = command.makes and all(path.exists() for path in command.makes)
        if done and stamp.is_file() and stamp.read_text() == digest:
            say(f"{command.name}: up to date")
            return False
        stamp.unlink(missing_ok=True)
        for path in () if command.continues else command.makes:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        say(command.name)
        run_command(command)
        for path in command.makes:
            if not path.exists():
                raise CommandFailed(f"{command.name}: the command left no {path}")
        write_whole(stamp, digest.encode())
        return True


def run_command(command: Command) -> None:
    """Print a command and run it. Raises CommandFailed if it cannot start or fails."""
    words = [str(free_port()) if word == FREE_PORT else word for word in command.words]
    print(f"$ {shown(words)}", flush=True)
    if words[0] == "python":
        words[0] = sys.executable
    folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    try:
        status = subprocess.run(words, env=environment, check=False).returncode
    except FileNotFoundError:
        raise CommandFailed(
            f"{command.name}: command {words[0]} not found; run make install in a checkout, or "
            "install this project with pip"
        ) from None
    if status:
        raise CommandFailed(f"{command.name}: the command above failed with exit status {status}")


def say(text: str) -> None:
    print(f"\nquickstart: {text}", flush=True)


def shown(words: Sequence[str], width: int = 96) -> str:
    """Format a command for pasting into a shell, with line breaks before flags if it is long."""
    groups: list[list[str]] = []
    for word in words[1:]:
        if groups and not word.startswith("-") and groups[-1][0].startswith("-"):
            groups[-1].append(word)
        else:
            groups.append([word])
    lines = [shlex.quote(words[0])]
    for group in groups:
        part = shlex.join(group)
        if len(lines[-1]) + 1 + len(part.partition("\n")[0]) > width:
            lines.append("   ")
        lines[-1] += f" {part}"
    return " \\\n".join(lines)


def free_port() -> int:
    """Return a TCP port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
