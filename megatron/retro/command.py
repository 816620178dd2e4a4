r"""Makes the database, the index and the neighbours of a Retro.

    python tools/retro/preprocess_data.py --retro-project-dir retro --retro-tasks build \
        --data-path data/my-corpus_text_document --split 98,2,0 \
        --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json \
        --merge-file gpt2-merges.txt --seq-length 512 --train-samples 100000 \
        --global-batch-size 256 --eval-interval 1000 --eval-iters 10 --bert-embedder-type hashing

torchrun and deepspeed start several processes, on one node or several that share the folder. What
was killed goes on where it was when it is started again. Needs the extra "retro".
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pkgutil import resolve_name

from megatron.config import ConfigError, ParallelConfig
from megatron.config.flags import ConfigResolver, build, nearest
from megatron.engine.environment import distributed
from megatron.retro.config import TASK_SPELLINGS, RetroPreprocessConfig
from megatron.retro.configure import configured
from megatron.training.launch import start_processes
from megatron.training.report import show_log
from megatron.training.run import RunToolParser, ending_process, errors_for_users

STAGES = {
    "db-build": "megatron.retro.database:build_database",
    "index-train": "megatron.retro.index.training:train_index",
    "index-add": "megatron.retro.index.adding:add_to_index",
    "query-neighbors": "megatron.retro.query:query_neighbors",
}
"""The stages in their order: functions of :class:`Preprocessing`, imported when they run."""
GROUPS = {"build": tuple(STAGES), "index-build": ("index-train", "index-add")}


def main() -> None:
    """Parses the command line and runs the tasks."""
    with ending_process(), errors_for_users():
        run_preprocessing(__doc__)


def run_preprocessing(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Runs the tasks of a command line. Raises ValueError or OSError if a flag or file cannot be
    used; the message names it."""
    show_log()
    settings = RunToolParser(RetroPreprocessConfig, description).settings(argv)
    ConfigResolver((RetroPreprocessConfig,), settings)
    stages = stages_of(build(RetroPreprocessConfig, settings).retro_tasks)
    processes = start_processes(settings, argv)
    with distributed(ParallelConfig()) if processes > 1 else nullcontext():
        work = configured(settings)
        for stage in stages:
            resolve_name(STAGES[stage])(work)


def stages_of(tasks: str) -> list[str]:
    """The stages of ``--retro-tasks``, in the order given. ConfigError if one is unknown."""
    found: list[str] = []
    for task in tasks.split(","):
        name = TASK_SPELLINGS.get(task.strip(), task.strip())
        if name not in STAGES and name not in GROUPS:
            known = (*GROUPS, *STAGES)
            hint = nearest(name, known, "; the nearest is {}")
            raise ConfigError(f"--retro-tasks {task}: the tasks are {', '.join(known)}{hint}")
        found += GROUPS.get(name, (name,))
    return found
