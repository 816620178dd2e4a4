"""Output of a run: checkpoints, logs and profiles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from megatron.config.flags import NOT_NEGATIVE, POSITIVE, ConfigResolver, Need, needs_value, option

_LOAD = needs_value("load")
_LOAD_NOTE = needs_value("load", refused=False)
_WEIGHTS = Need("--load", lambda values: bool(values["load"] or values["pretrained_checkpoint"]))
_SAVE_NOTE = needs_value("save", refused=False)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: where, how often, what."""

    save: str | None = option(None)
    """Folder to save checkpoints in; without it nothing is saved."""
    load: str | None = option(None)
    """Folder of checkpoints (the newest complete one is loaded) or one checkpoint, in the format of
    this project or another. Training starts from scratch if the folder has no checkpoint."""
    exit_on_missing_checkpoint: bool = option(False, needs=_LOAD)
    """Do not start from scratch if --load has no checkpoint: that is an error."""
    load_tag: str | None = option(None, needs=_LOAD)
    """Load this checkpoint of --load (for example global_step100) instead of the newest."""
    save_interval: int | None = option(
        None,
        aliases=("--save-iters", "--persistent-save-interval"),
        bounds=POSITIVE,
        needs=_SAVE_NOTE,
    )
    """Number of iterations between checkpoints; the last iteration is always saved."""
    save_init: bool = option(False)
    """Also save before the first iteration, as iteration 0."""
    checkpoint_format: str = option("safetensors", choices=("safetensors", "deepspeed"))
    """Format to save in: this project's, which every layout and --load can read, or DeepSpeed's."""
    async_save: bool = option(False)
    """Copy the state to host memory and write it while training continues."""
    keep_last: int | None = option(None, bounds=POSITIVE)
    """Number of newest checkpoints to keep; older ones are deleted."""
    keep_every: int | None = option(None, bounds=POSITIVE)
    """Keep checkpoints of every N-th iteration permanently, regardless of --keep-last."""
    keep_best: bool = option(False)
    """Keep the checkpoint with the lowest validation loss, regardless of --keep-last; an evaluation
    that is the best so far is followed by a checkpoint. best_epoch.json names it."""
    save_universal: bool = option(False)
    """Also write each checkpoint as a universal checkpoint of DeepSpeed."""
    universal_checkpoint: bool = option(False, needs=_LOAD)
    """Load DeepSpeed's universal checkpoint from a folder that has checkpoints of several formats;
    refused if it has none. Not needed otherwise: --load recognises the format."""
    pretrained_checkpoint: str | None = option(None)
    """Checkpoint to take the initial weights from when --load has none; where --load has adapters,
    the model that they belong to."""
    load_adapter: str | None = option(None, needs=needs_value("lora"))
    """Adapters for --lora to begin with when --load has none: a folder of peft, or a checkpoint of
    a run with --lora."""
    use_checkpoint_opt_param_scheduler: bool = option(
        False,
        flag="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-lr-scheduler"),
        needs=_LOAD,
    )
    """Use the learning rate, the weight decay and their schedules of the loaded checkpoint's run
    instead of those of the flags."""
    finetune: bool = option(False, needs=_WEIGHTS)
    """Load only the weights, and start at iteration 0."""
    reset_iteration: bool = option(False, needs=_LOAD)
    """Load weights and optimizer state, and start at iteration 0 with the first sample."""
    on_damaged_checkpoint: str = option("stop", choices=("stop", "previous"), needs=_LOAD)
    """What to do if the checkpoint that --load would continue from is damaged: stop, naming the
    newest older one that is whole, or continue from that one and set the damaged ones aside."""
    max_failed_saves: int = option(3, bounds=NOT_NEGATIVE, needs=_SAVE_NOTE)
    """Number of saves in a row that may fail until the run ends; 0 for no limit. The last save of a
    run must always succeed."""
    load_lr_state: bool = option(True, off="--no-load-lr-state", role="course")
    """Start the schedules of learning rate and weight decay again with --reset-iteration, as they
    always do here: they are functions of the iteration."""
    load_optim: bool = option(True, flag="--load-optim", off="--no-load-optim", needs=_LOAD_NOTE)
    """Load optimizer state."""
    load_rng: bool = option(True, flag="--load-rng", off="--no-load-rng", needs=_LOAD_NOTE)
    """Load random states."""
    save_optim: bool = option(True, flag="--save-optim", off="--no-save-optim", needs=_SAVE_NOTE)
    """Save optimizer state."""
    save_rng: bool = option(True, flag="--save-rng", off="--no-save-rng", needs=_SAVE_NOTE)
    """Save random states."""
    allow_changed_data: bool = option(False, needs=_LOAD_NOTE)
    """Continue from a checkpoint although files of data, or the models that the run learns from
    (reference, teacher), have other content than when it was saved. Without it that is an error.
    Other paths with the same content are accepted."""
    use_checkpoint_args: bool = option(False)
    """Use the model and tokenizer values of the checkpoint at --load where no flag is given."""

    def check(self, stored_states: bool, resolver: ConfigResolver) -> None:
        """Refuses values that contradict each other; ``stored_states``: the optimizer's states are
        not float32 tensors."""
        for name in (
            *("save_init", "keep_last", "keep_every", "async_save", "save_universal", "keep_best"),
        ):
            resolver.check(
                self.save is not None or not getattr(self, name),
                f"{resolver.show(name)} needs --save, the folder to save in",
            )
        resolver.check(
            self.keep_every is None or self.keep_last is not None,
            f"{resolver.show('keep_every')} exempts checkpoints from --keep-last and needs it; "
            "without both, all are kept",
        )
        resolver.check(
            self.reset_iteration or self.load_lr_state,
            "--no-load-lr-state needs --reset-iteration: learning rate and weight decay are "
            "functions of the iteration, and start again with it",
        )
        resolver.check(
            not (self.reset_iteration and self.finetune),
            "--reset-iteration keeps the optimizer state and --finetune does not; give one of them",
        )
        own, form = self.checkpoint_format == "safetensors", resolver.show("checkpoint_format")
        resolver.check(
            own or not self.async_save,
            f"{resolver.show('async_save')} contradicts {form}: training stops while DeepSpeed "
            "writes its folders",
        )
        resolver.check(
            own or self.save_optim,
            f"--no-save-optim contradicts {form}: DeepSpeed's folders keep weights and moments "
            "together",
        )
        resolver.check(
            own or not stored_states,
            f"--use-precision-aware-optimizer contradicts {form}: DeepSpeed writes main weights "
            "and moments that it has in float32; leave --checkpoint-format out, and add "
            "--save-universal for other programs",
        )


def _reports_to(*names: str) -> Need:
    """To one of these programs."""

    def met(values: Mapping[str, Any]) -> bool:
        flags = ("report_to", "tensorboard_dir", "wandb_project")
        trackers = LoggingConfig(**{name: values[name] for name in flags}).trackers
        return any(name in trackers for name in names)

    return Need(f"--report-to {' or '.join(names)}", met, refused=False)


_TENSORBOARD, _WANDB, _MLFLOW = map(_reports_to, ("tensorboard", "wandb", "mlflow"))
_TIMERS = needs_value("log_timers_to_tensorboard", refused=False)
_TRACKER = _reports_to("wandb", "mlflow", "trackio")


@dataclass(frozen=True)
class LoggingConfig:
    """Logging: what is reported, where."""

    log_interval: int = option(100, bounds=POSITIVE)
    """Number of iterations between log lines."""
    metrics_file: str | None = option(None, derived="metrics.jsonl in --save, if that is given")
    """JSON-lines file for the metrics of every log line and evaluation."""
    peak_tflops: float | None = option(None, derived="the accelerator's, or measured on CPU")
    """Peak TFLOP/s of one device, from which the log computes the model FLOP utilisation."""
    cost_per_gpu_hour: float | None = option(None, bounds=NOT_NEGATIVE)
    """Price of an hour of one device, on CPU of one process, in any currency: the log then has the
    cost so far, over all starts of the run, and the cost to finish."""
    grid_gco2_per_kwh: float | None = option(None, bounds=NOT_NEGATIVE)
    """Grams of CO2 for a kWh of electricity, from which the log computes those of the run, where
    its energy is counted."""
    report_to: tuple[str, ...] = option(())
    """Where metrics are also reported, several separated by commas: tensorboard, wandb, mlflow,
    trackio; none for none of them, also where --tensorboard-dir or --wandb-project is given."""
    tracker_project: str = option("megatron", needs=_TRACKER)
    """Project of the run in Weights & Biases and trackio, its experiment in MLflow."""
    run_name: str | None = option(None, needs=_TRACKER)
    """Name of the run in these programs, in which a resumed run is one more of that name."""
    tensorboard_dir: str | None = option(
        None, derived="tensorboard in --save, with --report-to tensorboard"
    )
    """Folder for TensorBoard; turns its writer on."""
    tensorboard_log_interval: int = option(1, needs=_TENSORBOARD)
    """Number of iterations between TensorBoard points."""
    tensorboard_queue_size: int = option(1000, needs=_TENSORBOARD)
    """Number of TensorBoard events that are buffered before a write."""
    log_timers_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write iteration times to TensorBoard, and those of --timing-log-level."""
    timing_log_level: int = option(0, choices=(0, 1, 2), needs=_TIMERS)
    """1 or 2: write the seconds of forward and backward passes and of the optimizer, too, on the
    first process; 2 is the same as 1."""
    log_batch_size_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write the global batch size to TensorBoard."""
    log_learning_rate_to_tensorboard: bool = option(
        True,
        off="--no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard",
        flag="--log-learning-rate-to-tensorboard",
        needs=_TENSORBOARD,
    )
    """Write the learning rate to TensorBoard (one spelling of the off flag is Megatron's)."""
    log_loss_scale_to_tensorboard: bool = option(
        True,
        off="--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
        flag="--log-loss-scale-to-tensorboard",
        needs=_TENSORBOARD,
    )
    """Write the loss scale to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write validation perplexity to TensorBoard."""
    log_memory_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write memory use to TensorBoard: of torch's allocator on a GPU, of the process on a CPU."""
    log_world_size_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write the number of processes to TensorBoard."""
    log_optimizer_states_to_tensorboard: bool = option(False, needs=_TENSORBOARD)
    """Write norms of momentum, variance, its root, and weights to TensorBoard: each l2, l1 and
    abs_max."""
    log_params_norm: bool = option(False)
    """Log the 2-norm of all trained weights, in float32."""
    log_num_zeros_in_grad: bool = option(False)
    """Log the number of zeros in the gradients, averaged over data-parallel ranks."""
    wandb_project: str | None = option(None)
    """Project in Weights & Biases; turns its writer on."""
    wandb_exp_name: str | None = option(None, needs=_WANDB)
    """Name of the run in Weights & Biases."""
    wandb_save_dir: str | None = option(None, needs=_WANDB)
    """Folder for the local files of Weights & Biases."""
    wandb_entity: str | None = option(None, needs=_WANDB)
    """Team or user in Weights & Biases."""
    mlflow_tracking_uri: str | None = option(
        None,
        derived="mlflow.db in --save, or MLFLOW_TRACKING_URI in the environment",
        needs=_MLFLOW,
    )
    """Store or server of MLflow, such as sqlite:////folder/mlflow.db or https://host:5000."""

    @property
    def trackers(self) -> tuple[str, ...]:
        """Names of the trackers to report to."""
        names = _names(self.report_to)
        named = {"tensorboard": self.tensorboard_dir, "wandb": self.wandb_project}
        if "none" in names:
            return ()
        return tuple(name for name in TRACKERS if name in names or named.get(name) is not None)


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Programs for experiments, by the names of ``--report-to``."""


def _names(values: Sequence[str]) -> list[str]:
    return [name for value in values for name in value.split(",") if name]


def resolve_logging(
    flags: LoggingConfig, save: str | None, resolver: ConfigResolver
) -> LoggingConfig:
    """Completes the logging of a run with checkpoints in ``save``."""
    names = _names(flags.report_to)
    unknown = [name for name in names if name not in (*TRACKERS, "none")]
    near = [*(get_close_matches(name, TRACKERS, 1) for name in unknown), []][0]
    meant = f" (did you mean {near[0]}?)" if near else ""
    resolver.check(
        not unknown,
        f"--report-to {','.join(names)}: {', '.join(unknown)} is not known{meant}; known are "
        f"{', '.join(TRACKERS)}, none",
    )
    resolver.check(
        "none" not in names or len(names) == 1,
        f"--report-to {','.join(names)}: none contradicts the others; leave one out",
    )
    inside = "" if save is None else save.rstrip("/")
    if save is not None and flags.metrics_file is None:
        file = resolver.put("metrics_file", f"{inside}/metrics.jsonl", "in --save")
        flags = replace(flags, metrics_file=file)
    if "tensorboard" in names and flags.tensorboard_dir is None:
        resolver.check(
            save is not None,
            "--report-to tensorboard needs a folder: --tensorboard-dir, or --save, in which it is "
            "tensorboard",
        )
        folder = resolver.put("tensorboard_dir", f"{inside}/tensorboard", "in --save")
        flags = replace(flags, tensorboard_dir=folder)
    resolver.check(
        "@" not in (flags.mlflow_tracking_uri or ""),
        "--mlflow-tracking-uri has a name or password in it, which checkpoints would have too: set "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
    )
    if "mlflow" in names and flags.mlflow_tracking_uri is None:
        resolver.check(
            save is not None or "MLFLOW_TRACKING_URI" in os.environ,
            "--report-to mlflow needs a store: --mlflow-tracking-uri, or --save, in which it is "
            "mlflow.db",
        )
        if "MLFLOW_TRACKING_URI" not in os.environ:
            database = f"sqlite:///{os.path.abspath(inside)}/mlflow.db"
            uri = resolver.put("mlflow_tracking_uri", database, "in --save")
            flags = replace(flags, mlflow_tracking_uri=uri)
    return flags
