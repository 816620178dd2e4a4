"""The steps of the quickstart: which model, trained how, by which commands."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.quickstart.measure import HeldOut
from megatron.quickstart.steps import FREE_PORT, Step

SPLIT = "97,3,0"
VOCAB_SIZE = 2048
SEQ_LENGTH = 256
GLOBAL_BATCH_SIZE = 8
EVALUATIONS = 5
PROMPT = "def read_file(path):\n"
DEEPSPEED_CONFIG = Path("deepspeed_configs/ds_zero1.json")

# A Llama of two million weights. The wide start suits so narrow a network and so short a run: with
# the usual 0.02 the validation loss after 600 thousand tokens was 5.3 instead of 4.6.
MODEL = """--num-layers 4 --hidden-size 192 --num-attention-heads 6 --use-rotary-position-embeddings
    --normalization RMSNorm --swiglu --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.05""".split()

OPTIMIZER = """--lr 4e-3 --min-lr 4e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03
    --weight-decay 0.1 --adam-beta2 0.95""".split()

# Nothing of this project: what people who get the model will do.
GENERATE = """\
from transformers import pipeline, set_seed
set_seed(1234)
generate = pipeline("text-generation", {folder})
text = generate({prompt}, max_new_tokens=100, do_sample=True, temperature=0.7, top_p=0.9)
print(text[0]["generated_text"])"""


@dataclass(frozen=True)
class Places:
    """Where the quickstart keeps everything, below one folder."""

    folder: Path

    @property
    def stamps(self) -> Path:
        """What of the steps is done."""
        return self.folder / ".stamps"

    @property
    def corpus(self) -> Path:
        """The text as JSON lines."""
        return self.folder / "data" / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        """Folder of vocab.json and merges.txt."""
        return self.folder / "tokenizer"

    @property
    def prefix(self) -> Path:
        """What --data-path gets."""
        return self.folder / "data" / "corpus_text_document"

    @property
    def checkpoints(self) -> Path:
        """What --save and --load get."""
        return self.folder / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """What --tensorboard-dir gets."""
        return self.folder / "tensorboard"

    @property
    def metrics(self) -> Path:
        """What --metrics-file gets."""
        return self.folder / "metrics.jsonl"

    @property
    def hf(self) -> Path:
        """The exported model."""
        return self.folder / "hf"

    @property
    def picture(self) -> Path:
        """Losses over tokens."""
        return self.folder / "loss.png"


def tokenizer_step(places: Places) -> Step:
    """Learns the vocabulary."""
    command = ["python", "tools/train_tokenizer.py", "--input", str(places.corpus)]
    command += ["--vocab-size", str(VOCAB_SIZE), "--output", str(places.tokenizer)]
    return Step("tokenizer", tuple(command), makes=(places.tokenizer,))


def data_step(places: Places) -> Step:
    """Turns the text into tokens."""
    command = ["python", "tools/preprocess_data.py", "--input", str(places.corpus)]
    command += ["--output-prefix", str(places.corpus.with_suffix("")), *tokenizer_flags(places)]
    command += ["--append-eod"]
    files = tuple(places.prefix.with_name(places.prefix.name + end) for end in (".bin", ".idx"))
    return Step("data", tuple(command), makes=files)


def tokenizer_flags(places: Places) -> list[str]:
    """The tokenizer, for commands that read or make tokens."""
    folder = places.tokenizer
    return [
        *("--tokenizer-type", "GPT2BPETokenizer"),
        *("--vocab-file", str(folder / "vocab.json"), "--merge-file", str(folder / "merges.txt")),
    ]


def train_command(places: Places, train_iters: int, reference: HeldOut) -> tuple[str, ...]:
    """The training command, to its end; each evaluation reads as much as the split has."""
    count = processes()
    evaluated = max(1, reference.tokens // (GLOBAL_BATCH_SIZE * SEQ_LENGTH))
    command = ["deepspeed", "--master_port", FREE_PORT, "--num_gpus", str(count)]
    command += ["pretrain_gpt.py", "--deepspeed_config", str(DEEPSPEED_CONFIG)]
    command += [*MODEL, "--seq-length", str(SEQ_LENGTH), *OPTIMIZER]
    command += ["--micro-batch-size", str(GLOBAL_BATCH_SIZE // count)]
    command += ["--global-batch-size", str(GLOBAL_BATCH_SIZE), "--train-iters", str(train_iters)]
    command += [*tokenizer_flags(places), "--data-path", str(places.prefix), "--split", SPLIT]
    command += ["--num-workers", "0", "--log-interval", str(max(1, train_iters // 64))]
    command += ["--eval-interval", str(max(1, train_iters // EVALUATIONS))]
    command += ["--eval-iters", str(evaluated), "--save", str(places.checkpoints)]
    command += ["--tensorboard-dir", str(places.tensorboard), "--metrics-file", str(places.metrics)]
    return tuple(command)


def processes() -> int:
    """Data-parallel processes: two, unless there is exactly one GPU, which two cannot share."""
    return 1 if torch.cuda.device_count() == 1 else 2


def train_step(places: Places, command: tuple[str, ...], stop_after: int) -> Step:
    """Trains the first part."""
    return Step(
        "train",
        (*command, "--exit-interval", str(stop_after)),
        reads=(DEEPSPEED_CONFIG,),
        makes=(places.checkpoints, places.metrics, places.tensorboard),
    )


def resume_step(places: Places, command: tuple[str, ...], train_iters: int) -> Step:
    """Trains the rest, from the checkpoint that the first part left."""
    return Step(
        "resume",
        (*command, "--load", str(places.checkpoints)),
        makes=(places.checkpoints / f"global_step{train_iters}",),
        goes_on=True,
    )


def export_step(places: Places) -> Step:
    """Writes the model for Hugging Face."""
    command = ["python", "tools/convert_checkpoint.py", "to-hf"]
    command += ["--load", str(places.checkpoints), "--output", str(places.hf)]
    return Step("export", tuple(command), makes=(places.hf,))


def generate_step(places: Places) -> Step:
    """Generates text with transformers alone; leaves no file."""
    program = GENERATE.format(folder=json.dumps(str(places.hf)), prompt=json.dumps(PROMPT))
    return Step("generate", ("python", "-c", program))
