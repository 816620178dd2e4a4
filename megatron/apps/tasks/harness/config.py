"""The flags of ``tools/evaluate.py`` in addition to the training flags."""

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
"""lm-eval's seeds of random, NumPy, torch and the examples of few-shot prompts."""


def _split(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


@dataclass(frozen=True)
class HarnessConfig(LengthConfig, CacheConfig):
    """Evaluation with lm-evaluation-harness: tasks, prompts, results."""

    tasks: str | None = option(None)
    """Names of tasks, groups or tags, patterns of names (lambada*) or YAML files, separated by
    commas; NAME=FILE reads the documents of a task from a file. ruler, its tasks, passkey,
    passkey_generate and loss_by_position=FILE measure long contexts."""
    task_list: str | None = option(None, flag="--task_list", aliases=("--task-list",))
    """--tasks by their names in lm-eval 0.2 (Megatron-DeepSpeed), without examples in a prompt
    unless --num-fewshot gives some."""
    include_path: str | None = option(None, aliases=("--include_path",))
    """Folder of task files, searched before those of lm-eval, and of documents: a task NAME reads
    the one file NAME*.jsonl, .json, .parquet, .txt, .raw or .tokens in it."""
    num_fewshot: int | None = option(None, aliases=("--num_fewshot",), bounds=NOT_NEGATIVE)
    """Examples in a prompt; a task whose file says 0 keeps it."""
    limit: float | None = option(None, bounds=POSITIVE)
    """Documents of each task, or below 1 a fraction of them; for trials only."""
    samples: str | None = option(None)
    """Numbers of the documents of each task, as JSON {"task": [0, 3]} or a file of it."""
    micro_batch_size: str = option(
        "1", flag="--batch-size", aliases=("--batch_size", "--micro-batch-size")
    )
    """Requests in a forward pass of a data-parallel rank, or auto: as many as make 16,384 tokens of
    the longest request, at most --max-batch-size."""
    max_batch_size: int = option(64, aliases=("--max_batch_size",), bounds=POSITIVE)
    """The most requests of --batch-size auto."""
    max_length: int | None = option(
        None, aliases=("--max_length",), derived="the model's positions", bounds=POSITIVE
    )
    """Tokens that the model sees; longer requests lose their beginning."""
    prefix_token_id: int | None = option(
        None, aliases=("--prefix_token_id",), derived="beginning or end of text"
    )
    """The token before a text that has no context."""
    use_cache: str | None = option(None, aliases=("--use_cache",))
    """Keep answers in FILE_rank0.db, in lm-eval's format, and read them from there."""
    output: str | None = option(None)
    """JSON file for the results."""
    results_path: str | None = option(None, flag="--results_path", aliases=("--results-path",))
    """JSON file for the results in the form of lm-eval 0.2: task, metric (acc, ppl), value."""
    eval_fp32: bool = option(False, flag="--eval_fp32", aliases=("--eval-fp32",))
    """Compute in float32 whatever --fp16, --bf16 and the DeepSpeed JSON say."""
    adaptive_seq_len: bool = option(
        False,
        flag="--adaptive_seq_len",
        aliases=("--adaptive-seq-len",),
        note="a batch is always padded to its longest request",
    )
    inference: bool = option(False, note="an evaluation computes no gradients")
    log_samples: bool = option(False, aliases=("--log_samples",))
    """Write every request with its answer next to --output, a file of JSON lines for each task."""
    predict_only: bool = option(False, aliases=("--predict_only",))
    """Write the answers without computing metrics; includes --log-samples."""
    gen_kwargs: str | None = option(None, aliases=("--gen_kwargs",))
    """What to change in how tasks generate: max_gen_toks=64,temperature=0.5,do_sample=True."""
    apply_chat_template: str | None = option(None, bare="", aliases=("--apply_chat_template",))
    """Put prompts into the chat template of the tokenizer, or that of this name."""
    system_instruction: str | None = option(None, aliases=("--system_instruction",))
    """System message before every prompt."""
    fewshot_as_multiturn: str | None = option(
        None,
        bare="true",
        choices=("true", "false"),
        aliases=("--fewshot_as_multiturn",),
        derived="true with a chat template",
    )
    """Make the examples of a prompt turns of a conversation."""
    seed: str = option(",".join(map(str, SEEDS)))
    """Seeds of random, NumPy, torch and few-shot examples, or one for all; None sets none."""
    bootstrap_iters: int = option(100000, aliases=("--bootstrap_iters",), bounds=NOT_NEGATIVE)
    """Draws for those standard errors that are estimated; 0 estimates none."""
    write_out: bool = option(False, aliases=("--write_out",))
    """Print the prompts of the first documents."""
    confirm_run_unsafe_code: bool = option(False, aliases=("--confirm_run_unsafe_code",))
    """Allow tasks that run code which the model has written."""
    metadata: str | None = option(None)
    """Values for tasks that ask for some, as JSON or key=value,key=value."""

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
        # Each checks its value.
        self.batch_size, self.seeds, self.documents, self.numbers, self.shares  # noqa: B018

    @property
    def tasks_flag(self) -> str:
        """The flag that names the tasks."""
        return "--tasks" if self.task_list is None else "--task_list"

    @property
    def task_names(self) -> list[str]:
        return _split(self.tasks or self.task_list or "")

    @property
    def fewshot(self) -> int | None:
        """Examples in a prompt; None leaves them to each task."""
        return 0 if self.num_fewshot is None and self.task_list is not None else self.num_fewshot

    @property
    def logs_samples(self) -> bool:
        return self.log_samples or self.predict_only

    @property
    def batch_size(self) -> int | None:
        """None for auto."""
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
        """Four, as :data:`SEEDS`."""
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
        """The value of --samples."""
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
        """True if examples become turns of a conversation."""
        if self.fewshot_as_multiturn is None:
            return self.apply_chat_template is not None
        return self.fewshot_as_multiturn == "true"

    @property
    def template(self) -> bool | str:
        """The chat template to apply: by name, the only one (True), or none (False)."""
        return False if self.apply_chat_template is None else self.apply_chat_template or True

    def to_dict(self) -> dict[str, Any]:
        """The flags that were given, for the file of results."""
        return {
            flag_of(field): value
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


@dataclass(frozen=True)
class DownloadConfig:
    """Download of the data sets of tasks."""

    task_list: str | None = option(None, flag="--task_list", aliases=("--task-list", "--tasks"))
    """Names of tasks of lm-eval 0.2 or 0.4, separated by commas."""

    @property
    def task_names(self) -> list[str]:
        """Raises ConfigError if no name is given."""
        names = _split(self.task_list or "")
        if not names:
            raise ConfigError("--task_list is missing: names of tasks, separated by commas")
        return names
