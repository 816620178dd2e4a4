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
"""Runs a task. It gets the flags of the task, the settings of training without them, completed by
:func:`megatron.features.evaluation.checkpoints.checkpoint_settings`, and the number of processes,
of which this is one. It raises ValueError or OSError, which names the flag, file or checkpoint, if
one cannot be used."""


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
"""Imports the function of every task by its name in ``--task``."""


def main() -> None:
    """Parses the command line and runs the task."""
    with ending_process(), errors_for_users():
        run_task(__doc__)


def run_task(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs the task of a command line. Raises ValueError or OSError if a flag, a file or a
    checkpoint cannot be used; the message names it."""
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
    """Evaluation of a GPT-2."""

    model_path: str | None = option(None)
    """Folder of checkpoints, or of a Hugging Face GPT-2."""
    data_path: str | None = option(None)
    """Text to evaluate on."""
    cloze_eval: bool = option(False)
    """Accuracy on LAMBADA: JSON lines with "text"."""
    webtext_eval: bool = option(False)
    """Perplexity of a loose JSON file."""
    eval_iters: int = option(5000)
    """With --webtext-eval: the largest number of batches."""
    load_openai: bool = option(False)
    """--model-path is a Hugging Face folder, which determines the model's sizes."""
    num_layers: int | None = option(None, derived="12, or that of --load-openai")
    """Number of layers."""
    hidden_size: int | None = option(None, derived="768, or that of --load-openai")
    """Width of the hidden states."""
    num_attention_heads: int | None = option(None, derived="12, or that of --load-openai")
    """Number of attention heads."""
    batch_size: int = option(4)
    """Samples that are evaluated together."""
    model_parallel_size: int = option(1)
    """Processes among which the matrices of every layer are divided."""
    cache_dir: str = option("cache")
    """Folder of vocab.json and merges.txt of gpt2."""

    def check(self) -> None:
        """Raises ConfigError if a path is missing, or two tasks are asked for."""
        for name in ("model_path", "data_path"):
            if getattr(self, name) is None:
                raise ConfigError(f"--{name.replace('_', '-')} is missing")
        if self.cloze_eval and self.webtext_eval:
            raise ConfigError("--cloze-eval and --webtext-eval: give one of them")

    def task_flags(self) -> list[str]:
        """The words after tasks/main.py: 2019's length of 1,024, windows of 32 and float16."""
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
            # A launcher, where there is one, has started them.
            words += [] if "WORLD_SIZE" in os.environ else ["--num-gpus-per-node", size]
        words += ["--use-checkpoint-args"] * self.load_openai
        return ["--task", *task, *words, "--fp16", "--no-load-optim", "--no-load-rng"]
