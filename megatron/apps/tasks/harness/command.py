"""Command-line evaluation with lm-eval."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.apps.generation.generation.config import unused_flags
from megatron.apps.generation.opening import for_generation, runner_of
from megatron.apps.pictures.length import draw_lengths, scores_by_length
from megatron.apps.tasks.harness.config import DownloadConfig, HarnessConfig
from megatron.apps.tasks.harness.version_02 import results_02
from megatron.apps.tasks.report import EvaluatedModel, versions
from megatron.config import ConfigError, Setting, Settings, parse_configs
from megatron.config.output import check_output
from megatron.engine.deepspeed_file import read_json
from megatron.engine.deepspeed_json import get
from megatron.families import family_of
from megatron.features.evaluation.checkpoints import Opened, opened_checkpoint
from megatron.run.run import Run, RunToolParser, start_processes
from megatron.util.files import write_whole
from megatron.util.processes import is_main_process
from megatron.util.progress import say
from megatron.util.secrets import without_secrets

if TYPE_CHECKING:
    from megatron.apps.tasks.harness.model import HarnessModel

_SIZES = {
    *("num_layers", "hidden_size", "num_attention_heads"),
    *("seq_length", "max_position_embeddings"),
}
_HALF = {"fp16", "bf16"}
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}
"""Suffixes of weight files."""


@dataclass(frozen=True)
class HarnessRun:
    """Checkpoint opened for lm-eval: the model in lm-eval's interface, its run, and its
    description."""

    model: HarnessModel
    run: Run
    checkpoint: EvaluatedModel


def run_evaluation(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Evaluate the checkpoint that the command line selects. Raises ValueError or OSError, naming
    the cause, if a flag, a file or a checkpoint cannot be used."""
    config, settings, processes = parsed(description, argv)
    from megatron.apps.tasks.harness.tasks import generate, load_tasks
    from megatron.apps.tasks.length.tasks import LengthPlan

    plan = LengthPlan.of(config.task_names, config.tasks_flag)
    manager, tasks = load_tasks(
        plan.others, config.include_path, _values(config), config.tasks_flag
    )
    generates = generate(tasks) or plan.generates
    with opened_model(config, settings, processes, generates) as opened:
        seed = config.seeds[0] or 0
        tasks += plan.built(opened.model, config, config.limit, seed)
        results = evaluate(opened.model, config, manager, tasks, bool(plan.tasks))
        if is_main_process():
            _report(results, config, opened)


def run_download(description: str | None, argv: Sequence[str] | None = None) -> None:
    """Download the datasets of tasks into the cache folder (``HF_HOME``), where evaluations read
    them. Raises ConfigError if a task is unknown or its data cannot be downloaded."""
    (config,) = parse_configs((DownloadConfig,), argv, description=description)
    os.environ.setdefault("HF_DATASETS_OFFLINE", "0")
    names = config.task_names
    require_harness()
    from megatron.apps.tasks.harness.tasks import load_tasks

    load_tasks(names, None, None, "--task_list")
    say(f"{', '.join(names)}: the data are on this machine")


def parsed(
    description: str | None, argv: Sequence[str] | None = None
) -> tuple[HarnessConfig, Settings, int]:
    """Return the flags of an evaluation, the settings of its run, and its number of processes.
    Raises ConfigError if a flag is wrong, or if lm-eval is not installed."""
    config, settings = RunToolParser(HarnessConfig, description).parse(argv)
    if "load" not in settings:
        raise ConfigError("--load is missing: the checkpoint to evaluate")
    require_harness()
    processes = start_processes(settings, argv)
    if is_main_process():
        check_output("--output", config.output)
        check_output("--results_path", config.results_path)
        for line in unused_flags(config):
            say(line)
    if config.task_list is not None:
        settings = without_training(settings)
    if config.eval_fp32:
        settings = {name: value for name, value in settings.items() if name not in _HALF}
    return config, settings, processes


def without_training(settings: Settings) -> Settings:
    """Return the settings of a Megatron-DeepSpeed command without its training settings. Sizes of
    -1 are dropped, so that the checkpoint's sizes are used. Of the DeepSpeed JSON, which describes
    a training run, only the dtype is kept. Raises ConfigError if the JSON cannot be used."""
    kept = {
        name: setting
        for name, setting in settings.items()
        if name != "deepspeed_config" and not (name in _SIZES and setting.value == -1)
    }
    if "deepspeed_config" in settings:
        path = settings["deepspeed_config"].value
        content = read_json(path)
        for name in _HALF - kept.keys():
            if get(content, f"{name}.enabled") is True:
                kept[name] = Setting(True, f"{Path(path).name}: {name}.enabled")
    return kept


@contextmanager
def opened_model(
    config: HarnessConfig, settings: Settings, processes: int, generates: bool = False
) -> Iterator[HarnessRun]:
    """Open the checkpoint of ``--load`` in the layout that the flags set, as a context manager.
    ``generates`` must be true if any task generates text. Raises ConfigError, CheckpointError or
    OSError if the checkpoint cannot be used."""
    if generates:
        settings = for_generation(settings)
    with opened_checkpoint(settings, processes, "an evaluation", watched=True) as opened:
        note = family_of(opened.engine.config.model.family).scoring_note
        if note is not None and is_main_process():
            say(note)
        model = _model(opened, config, generates)
        checkpoint = EvaluatedModel.of(opened.run.config, opened.folder, opened.iteration)
        yield HarnessRun(model, opened.run, checkpoint)
        if model.answer_cache is not None:
            model.answer_cache.close()


def require_harness() -> None:
    """Raise ConfigError if lm-eval is not installed; otherwise prepare its import. Sets the
    environment variables that make it read datasets offline, unless the user has set them."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "lm_eval is not installed: run pip install -e '.[evaluate]' in the checkout"
        )
    # lm-eval imports a package named evaluate, so tools/evaluate.py must not shadow it.
    tools = Path(sys.argv[0]).resolve().parent
    if (tools / "evaluate.py").is_file():
        sys.path[:] = [folder for folder in sys.path if Path(folder).resolve() != tools]
    if not is_main_process():
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # The datasets and huggingface_hub packages read these variables when imported.
    os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", os.environ["HF_DATASETS_OFFLINE"])


def _model(opened: Opened, config: HarnessConfig, generates: bool) -> HarnessModel:
    from megatron.apps.generation.writing import TextWriter
    from megatron.apps.tasks.harness.model import HarnessModel
    from megatron.apps.tasks.harness.scoring import AnswerCache, TextScorer

    run, folder = opened.run, opened.folder
    scorer = TextScorer(opened.engine, run.tokenizer, config.batch_size, config.max_batch_size)
    model = HarnessModel(scorer, config.max_length, config.prefix_token_id, opened.ends)
    if config.use_cache is not None:
        dtype = model.get_model_info()["model_dtype"]
        depends = [
            asdict(run.config.model), asdict(run.config.tokenizer), model.prefix_token_id,
            sorted(opened.ends),
        ]  # fmt: skip
        mark = fingerprint(folder, depends)
        name = f"{folder.resolve()} ({mark}), {dtype}, {model.max_length} tokens"
        model.answer_cache = AnswerCache(config.use_cache, name)
    if generates:
        runner = runner_of(opened.engine, run.tokenizer, config)
        model.writer = TextWriter(opened.engine.mesh, run.tokenizer, runner)
    return model


def fingerprint(folder: Path, depends: Any) -> str:
    """Return a fingerprint of everything that the answers depend on: ``depends`` and the
    checkpoint's weights, identified by size and modification time of their files so that replaced
    files are noticed."""
    files = [path for path in folder.rglob("*") if path.suffix in _WEIGHTS]
    stats = sorted(
        (str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in files
    )
    content = json.dumps([stats, depends], sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def _values(config: HarnessConfig) -> dict[str, Any] | None:
    """Return the metadata that --metadata sets for tasks, or None."""
    from lm_eval.utils import simple_parse_args_string

    text = (config.metadata or "").strip()
    try:
        return json.loads(text) if text.startswith("{") else simple_parse_args_string(text) or None
    except ValueError as error:
        raise ConfigError(f"--metadata {text} is not JSON: {error}") from None


def evaluate(
    model: HarnessModel,
    config: HarnessConfig,
    manager: Any,
    tasks: Sequence[Any],
    with_samples: bool = False,
) -> dict[str, Any]:
    """Return lm-eval's results, with all samples if ``with_samples`` or a flag requests them.
    Collective: every rank must call it. Processes with a local rank above 0 get an empty dict, and
    bootstrapped standard errors exist only on the main process."""
    from lm_eval import evaluator

    evaluator.get_git_commit_hash = _git_hash
    python, numpy, torch, fewshot = config.seeds
    results = evaluator.simple_evaluate(
        model,
        tasks=list(tasks),
        task_manager=manager,
        num_fewshot=config.fewshot,
        limit=config.limit,
        samples=config.documents,
        bootstrap_iters=config.bootstrap_iters if is_main_process() else 0,
        write_out=config.write_out and is_main_process(),
        log_samples=config.logs_samples or with_samples,
        predict_only=config.predict_only,
        system_instruction=config.system_instruction,
        apply_chat_template=config.template,
        fewshot_as_multiturn=config.multiturn,
        gen_kwargs=config.gen_kwargs,
        batch_size=config.micro_batch_size,
        random_seed=python,
        numpy_random_seed=numpy,
        torch_random_seed=torch,
        fewshot_random_seed=fewshot,
        confirm_run_unsafe_code=config.confirm_run_unsafe_code,
        metadata=_values(config),
    )
    return results or {}


def _git_hash() -> str | None:
    """Return the value of lm-eval's ``git_hash``. Unlike lm-eval's own function, this one hides
    git's error message outside of repositories."""
    from lm_eval.loggers.utils import get_commit_from_path

    words = ["git", "describe", "--always"]
    try:
        return subprocess.check_output(words, stderr=subprocess.DEVNULL, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return get_commit_from_path(Path.cwd())


def _report(results: dict[str, Any], config: HarnessConfig, opened: HarnessRun) -> None:
    """Print lm-eval's results table, and write the result files."""
    from lm_eval.utils import make_table

    samples = results.pop("samples", None) or {}
    by_length = scores_by_length(results["results"], samples)
    if by_length:
        results["by_length"] = by_length
    say(make_table(results))
    if "groups" in results:
        say(make_table(results, "groups"))
    speed = opened.model.scorer.speed
    if speed.seconds:
        say(
            f"{speed.requests:,} requests, {speed.tokens:,} tokens in {speed.seconds:.1f} s: "
            f"{speed.tokens / speed.seconds:,.0f} tokens/s"
        )
    if config.results_path is not None:
        older = results_02(results, opened.checkpoint.checkpoint)
        write_whole(Path(config.results_path), _json(older, indent=2))
    if config.output is None:
        return
    path = Path(config.output)
    if by_length:
        draw_lengths(by_length, path.with_suffix(".png"))
        say(f"scores by length and depth: {path.with_suffix('.png')}")
    for task, rows in samples.items() if config.logs_samples else ():
        name = task.replace("/", "__").replace(" ", "_")
        file = path.with_name(f"{path.stem}_samples_{name}.jsonl")
        write_whole(file, b"".join(map(_json, rows)))
    results["megatron"] = {
        "versions": versions(),
        "model": asdict(opened.checkpoint),
        "flags": without_secrets(config.to_dict()),
        "run": without_secrets(opened.run.config.to_dict()),
        "speed": asdict(speed),
    }
    write_whole(path, _json(results, indent=2))


def _json(value: Any, indent: int | None = None) -> bytes:
    """Return a value as lm-eval's JSON, with a final line break."""
    from lm_eval.utils import handle_non_serializable

    text = json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)
    return f"{text}\n".encode()
