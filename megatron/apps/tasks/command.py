r"""Evaluates a model, or fine-tunes it for a task.

    python tasks/main.py --task WIKITEXT103 --valid-data wikitext-103/wiki.test.tokens \
        --load checkpoints --micro-batch-size 8

    python tasks/main.py --task LAMBADA --strict-lambada --valid-data lambada_test.jsonl \
        --load checkpoints --micro-batch-size 8

--load takes a checkpoint of this project, Hugging Face, Megatron or DeepSpeed. Model and tokenizer
are the checkpoint's unless --num-layers is given. torchrun and deepspeed start several processes;
the results are the same for every layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.apps.tasks.config import EVALUATION, FINE_TUNING, INDEX, TaskConfig
from megatron.config import ConfigError, Setting, Settings
from megatron.config.flags import nearest, option
from megatron.features.evaluation.checkpoints import checkpoint_settings
from megatron.run.process import ending_process, errors_for_users
from megatron.run.run import RunToolParser, start_processes

TaskFunction = Callable[[TaskConfig, Settings, int], None]
"""Function that runs a task. Its arguments are the flags of the task; the training settings other
than those flags, completed by :func:`megatron.features.evaluation.checkpoints.checkpoint_settings`;
and the number of processes. Raises ValueError or OSError, naming the cause, if a flag, file or
checkpoint cannot be used."""


def _zero_shot() -> TaskFunction:
    from megatron.apps.tasks.zeroshot.command import run_zero_shot

    return run_zero_shot


def _fine_tuning() -> TaskFunction:
    from megatron.apps.tasks.fine_tuning.command import run_fine_tuning

    return run_fine_tuning


def _retriever() -> TaskFunction:
    from megatron.apps.tasks.retrieval.command import run_retriever

    return run_retriever


TASKS: dict[str, Callable[[], TaskFunction]] = {
    **dict.fromkeys(("WIKITEXT103", "LAMBADA", "RAW"), _zero_shot),
    **dict.fromkeys(
        ("RACE", "MNLI", "QQP", "QNLI", "SST-2", "CoLA", "STS-B", "MRPC", "RTE", "SQUAD"),
        _fine_tuning,
    ),
    FINE_TUNING: _fine_tuning,
    **dict.fromkeys((EVALUATION, "ICT-ZEROSHOT-NQ", INDEX), _retriever),
}
"""For each value of ``--task``, a function that imports and returns the task's function."""


def main() -> None:
    """Parse the command line and run the task. Errors of the user end the process with a
    message."""
    with ending_process(), errors_for_users():
        run_task(__doc__)


def run_task(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Run the task that the command line selects. Raises ValueError or OSError, naming the cause,
    if a flag, a file or a checkpoint cannot be used."""
    epilog = f"The tasks are {', '.join(TASKS)}."
    config, settings = RunToolParser(TaskConfig, description, epilog).parse(argv)
    if config.task is None:
        raise ConfigError(f"--task is missing: {', '.join(TASKS)}")
    if config.task not in TASKS:
        hint = nearest(config.task, TASKS, "; the nearest is {}")
        raise ConfigError(f"--task {config.task}: the tasks are {', '.join(TASKS)}{hint}")
    if config.ict_load is not None:
        settings = {"load": Setting(config.ict_load, "flag --ict-load")} | settings
    processes = start_processes(settings, argv)
    run = TASKS[config.task]()
    run(config, checkpoint_settings(settings), processes)


@dataclass(frozen=True)
class Gpt2EvalConfig:
    """Evaluation of a GPT-2 model."""

    model_path: str | None = option(None)
    """Folder of checkpoints, or of a Hugging Face GPT-2 model."""
    data_path: str | None = option(None)
    """File to evaluate on: plain text, or JSON lines with --cloze-eval or --webtext-eval."""
    cloze_eval: bool = option(False)
    """Accuracy on LAMBADA: a file of JSON lines with the key "text"."""
    webtext_eval: bool = option(False)
    """Perplexity on a JSON-lines file of documents."""
    eval_iters: int = option(5000)
    """With --webtext-eval: maximum number of batches to evaluate."""
    load_openai: bool = option(False)
    """--model-path is a Hugging Face folder, whose configuration sets the model's sizes."""
    num_layers: int | None = option(None, derived="12, or that of --load-openai")
    """Number of layers."""
    hidden_size: int | None = option(None, derived="768, or that of --load-openai")
    """Width of the hidden states."""
    num_attention_heads: int | None = option(None, derived="12, or that of --load-openai")
    """Number of attention heads."""
    batch_size: int = option(4)
    """Number of samples in an evaluation batch."""
    model_parallel_size: int = option(1)
    """Tensor-parallel size: number of processes over which each layer's matrices are sharded."""
    cache_dir: str = option("cache")
    """Folder with the vocab.json and merges.txt of the gpt2 tokenizer."""

    def check(self) -> None:
        """Raise ConfigError if a path is missing, or if both tasks are selected."""
        for name in ("model_path", "data_path"):
            if getattr(self, name) is None:
                raise ConfigError(f"--{name.replace('_', '-')} is missing")
        if self.cloze_eval and self.webtext_eval:
            raise ConfigError("--cloze-eval and --webtext-eval: give one of them")

    def task_flags(self) -> list[str]:
        """Return the arguments for tasks/main.py that reproduce Megatron-LM's evaluation of 2019:
        sequence length 1,024, windows that advance by 32 tokens, and float16."""
        task = ["WIKITEXT103", "--overlapping-eval", "32"]
        if self.cloze_eval:
            task = ["LAMBADA"]
        elif self.webtext_eval:
            task = ["RAW", "--eval-iters", str(self.eval_iters)]
        sizes = {
            "--num-layers": self.num_layers,
            "--hidden-size": self.hidden_size,
            "--num-attention-heads": self.num_attention_heads,
        }
        if not self.load_openai:
            of_2019 = {"--num-layers": 12, "--hidden-size": 768, "--num-attention-heads": 12}
            sizes = {flag: of_2019[flag] if size is None else size for flag, size in sizes.items()}
            sizes |= {"--seq-length": 1024, "--max-position-embeddings": 1024}
        model = {
            "--valid-data": self.data_path,
            "--load": self.model_path,
            **sizes,
            "--micro-batch-size": self.batch_size,
            "--tokenizer-type": "GPT2BPETokenizer",
            "--cache-dir": self.cache_dir,
        }
        pairs = [(flag, value) for flag, value in model.items() if value is not None]
        words = [str(word) for pair in pairs for word in pair]
        if self.model_parallel_size > 1:
            size = str(self.model_parallel_size)
            words += ["--tensor-model-parallel-size", size]
            # A launcher, if any, has already started the processes.
            words += [] if "WORLD_SIZE" in os.environ else ["--num-gpus-per-node", size]
        words += ["--use-checkpoint-args"] * self.load_openai
        return ["--task", *task, *words, "--fp16", "--no-load-optim", "--no-load-rng"]
