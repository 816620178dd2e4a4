"""Flags of ``tools/evaluate.py`` in addition to the training flags."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.apps.generation.memory import CacheConfig
from megatron.apps.tasks.length.config import LengthConfig
from megatron.config import ConfigError
from megatron.config.flags import NOT_NEGATIVE, POSITIVE, flag_of, option

SEEDS = (0, 1234, 1234, 1234)
"""lm-eval's default seeds for Python's random, NumPy, torch and the sampling of few-shot
examples."""


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


@dataclass(frozen=True)
class HarnessConfig(LengthConfig, CacheConfig):
    """Evaluation with lm-evaluation-harness: tasks, prompts, results."""

    tasks: str | None = option(None)
    """Comma-separated names of tasks, groups or tags, name patterns (lambada*) or YAML files.
    NAME=FILE reads the documents of a task from a file. ruler, its tasks, passkey, passkey_generate
    and loss_by_position=FILE measure long contexts."""
    task_list: str | None = option(None, flag="--task_list", aliases=("--task-list",))
    """Like --tasks, with the task names of lm-eval 0.2 (Megatron-DeepSpeed). Prompts have no
    few-shot examples unless --num-fewshot is given."""
    include_path: str | None = option(None, aliases=("--include_path",))
    """Folder of task files, which take precedence over those of lm-eval, and of documents: a task
    NAME reads the only file NAME*.jsonl, .json, .parquet, .txt, .raw or .tokens in it."""
    num_fewshot: int | None = option(None, aliases=("--num_fewshot",), bounds=NOT_NEGATIVE)
    """Number of few-shot examples in a prompt. Tasks whose files set 0 keep 0."""
    limit: float | None = option(None, bounds=POSITIVE)
    """Number of documents per task, or a fraction of the documents if below 1. For trials only."""
    samples: str | None = option(None)
    """Indices of the documents to use in each task, as JSON {"task": [0, 3]} or a file with such
    JSON."""
    micro_batch_size: str = option(
        "1", flag="--batch-size", aliases=("--batch_size", "--micro-batch-size")
    )
    """Requests per forward pass on each data-parallel rank. auto uses as many as fit into 16,384
    tokens when padded to the longest request, up to --max-batch-size."""
    max_batch_size: int = option(64, aliases=("--max_batch_size",), bounds=POSITIVE)
    """Maximum number of requests with --batch-size auto."""
    max_length: int | None = option(
        None, aliases=("--max_length",), derived="the model's positions", bounds=POSITIVE
    )
    """Maximum number of tokens per request. Longer requests are truncated on the left."""
    prefix_token_id: int | None = option(
        None, aliases=("--prefix_token_id",), derived="beginning or end of text"
    )
    """Id of the token that is prepended to a text without context."""
    use_cache: str | None = option(None, aliases=("--use_cache",))
    """Cache answers in FILE_rank0.db, in lm-eval's format, and reuse cached answers."""
    output: str | None = option(None)
    """JSON file to write the results to."""
    results_path: str | None = option(None, flag="--results_path", aliases=("--results-path",))
    """JSON file to write the results to in the format of lm-eval 0.2: task, metric (acc, ppl),
    value."""
    eval_fp32: bool = option(False, flag="--eval_fp32", aliases=("--eval-fp32",))
    """Compute in float32, regardless of --fp16, --bf16 and the DeepSpeed JSON."""
    adaptive_seq_len: bool = option(
        False,
        flag="--adaptive_seq_len",
        aliases=("--adaptive-seq-len",),
        note="a batch is always padded to its longest request",
    )
    inference: bool = option(False, note="an evaluation computes no gradients")
    log_samples: bool = option(False, aliases=("--log_samples",))
    """Write every request with its answer next to --output, in one JSON lines file per task."""
    predict_only: bool = option(False, aliases=("--predict_only",))
    """Write the answers without computing metrics. Includes --log-samples."""
    gen_kwargs: str | None = option(None, aliases=("--gen_kwargs",))
    """Generation settings that override those of the tasks, such as
    max_gen_toks=64,temperature=0.5,do_sample=True."""
    apply_chat_template: str | None = option(None, bare="", aliases=("--apply_chat_template",))
    """Format prompts with the tokenizer's chat template, or with the template of the given name."""
    system_instruction: str | None = option(None, aliases=("--system_instruction",))
    """System message to put before every prompt."""
    fewshot_as_multiturn: str | None = option(
        None,
        bare="true",
        choices=("true", "false"),
        aliases=("--fewshot_as_multiturn",),
        derived="true with a chat template",
    )
    """Present few-shot examples as turns of a conversation."""
    seed: str = option(",".join(map(str, SEEDS)))
    """Seeds of Python's random, NumPy, torch and few-shot examples, or one seed for all. None
    leaves a generator unseeded."""
    bootstrap_iters: int = option(100000, aliases=("--bootstrap_iters",), bounds=NOT_NEGATIVE)
    """Number of bootstrap samples for estimating standard errors. 0 disables bootstrapping."""
    write_out: bool = option(False, aliases=("--write_out",))
    """Print the prompts of the first documents of each task."""
    confirm_run_unsafe_code: bool = option(False, aliases=("--confirm_run_unsafe_code",))
    """Allow tasks that execute code written by the model."""
    metadata: str | None = option(None)
    """Values for tasks that require metadata, as JSON or key=value,key=value."""

    def __post_init__(self) -> None:
        if self.tasks is not None and self.task_list is not None:
            raise ConfigError("--tasks and --task_list: give one of them")
        if not self.task_names:
            raise ConfigError(f"{self.tasks_flag} is missing: names of tasks, separated by commas")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigError(
                f"--include-path {self.include_path} is not a folder; "
                "name the one with your tasks' YAML files"
            )
        if self.limit is not None and self.samples is not None:
            raise ConfigError(f"--limit {self.limit:g} and --samples: give one of them")
        if self.logs_samples and self.output is None:
            flag = "--log-samples" if self.log_samples else "--predict-only"
            raise ConfigError(f"{flag} needs --output, next to which it writes")
        for flag, file in (("--output", self.output), ("--results_path", self.results_path)):
            if file is not None and not Path(file).absolute().parent.is_dir():
                raise ConfigError(f"{flag} {file}: its folder does not exist; create it")
            if file is not None and Path(file).is_dir():
                raise ConfigError(f"{flag} {file} is a folder; name a file")
        if self.fewshot_as_multiturn == "true" and self.apply_chat_template is None:
            raise ConfigError("--fewshot-as-multiturn needs --apply-chat-template")
        # Reading these properties checks their flags.
        self.batch_size, self.seeds, self.documents, self.numbers, self.shares  # noqa: B018

    @property
    def tasks_flag(self) -> str:
        """Flag with which the user selected the tasks."""
        return "--tasks" if self.task_list is None else "--task_list"

    @property
    def task_names(self) -> list[str]:
        return _split(self.tasks or self.task_list or "")

    @property
    def fewshot(self) -> int | None:
        """Number of few-shot examples in a prompt. None leaves the number to each task."""
        return 0 if self.num_fewshot is None and self.task_list is not None else self.num_fewshot

    @property
    def logs_samples(self) -> bool:
        return self.log_samples or self.predict_only

    @property
    def batch_size(self) -> int | None:
        """Requests per forward pass, or None for auto. Raises ConfigError for any other value."""
        if self.micro_batch_size == "auto":
            return None
        if self.micro_batch_size.isdecimal() and int(self.micro_batch_size) > 0:
            return int(self.micro_batch_size)
        advice = "; auto needs no second number here" * self.micro_batch_size.startswith("auto:")
        raise ConfigError(
            f"--batch-size {self.micro_batch_size}: expected a positive number or auto{advice}"
        )

    @property
    def seeds(self) -> list[int | None]:
        """Seeds in the order of :data:`SEEDS`. Raises ConfigError if --seed is malformed."""
        words = [word.strip().lower() for word in self.seed.split(",")]
        try:
            numbers = [None if word == "none" else int(word) for word in words]
        except ValueError:
            numbers = []
        if len(numbers) not in (1, len(SEEDS)):
            raise ConfigError(
                f"--seed {self.seed}: expected a number, or four separated by commas, of which "
                "None leaves one alone"
            )
        return numbers * (len(SEEDS) // len(numbers))

    @property
    def documents(self) -> dict[str, list[int]] | None:
        """Parsed value of --samples, or None without the flag. Raises ConfigError if it is
        malformed."""
        if self.samples is None:
            return None
        path = Path(self.samples)
        inline = self.samples.lstrip().startswith("{")
        try:
            content = json.loads(self.samples if inline else path.read_text())
            return {str(task): [int(i) for i in numbers] for task, numbers in content.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f'--samples {self.samples}: expected JSON, {{"task": [0, 3]}}, or a file of it '
                f"({error})"
            ) from None

    @property
    def multiturn(self) -> bool:
        """True if few-shot examples become turns of a conversation."""
        if self.fewshot_as_multiturn is None:
            return self.apply_chat_template is not None
        return self.fewshot_as_multiturn == "true"

    @property
    def template(self) -> bool | str:
        """Chat template to apply: a name, True for the tokenizer's only template, or False for
        none."""
        return False if self.apply_chat_template is None else self.apply_chat_template or True

    def to_dict(self) -> dict[str, Any]:
        """Return the flags that differ from their defaults, for the results file."""
        return {
            flag_of(field): value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


@dataclass(frozen=True)
class DownloadConfig:
    """Download of the datasets of tasks."""

    task_list: str | None = option(None, flag="--task_list", aliases=("--task-list", "--tasks"))
    """Comma-separated names of tasks of lm-eval 0.2 or 0.4."""

    @property
    def task_names(self) -> list[str]:
        """Names in --task_list. Raises ConfigError if the list is empty."""
        names = _split(self.task_list or "")
        if not names:
            raise ConfigError("--task_list is missing: names of tasks, separated by commas")
        return names
