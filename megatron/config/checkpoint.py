"""Where to save and load, how often, and what."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import POSITIVE, option
from megatron.config.resolver import ConfigResolver


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: where, how often, what."""

    save: str | None = option(None)
    """Folder to save checkpoints in."""
    load: str | None = option(None)
    """Folder to load the newest complete checkpoint from, or one checkpoint, of this or another
    format; training starts anew if the folder has none."""
    load_tag: str | None = option(None)
    """Load this checkpoint (for example global_step100) instead of the newest."""
    save_interval: int | None = option(None, bounds=POSITIVE)
    """Steps between saves; the last step is always saved."""
    checkpoint_format: str = option("safetensors", choices=("safetensors", "deepspeed"))
    """This project's own files, which any layout and --load take, or DeepSpeed's own."""
    async_save: bool = option(False)
    """Copy the state to host memory and write it while training goes on."""
    keep_last: int | None = option(None, bounds=POSITIVE)
    """Keep only so many of the newest checkpoints."""
    keep_every: int | None = option(None, bounds=POSITIVE)
    """Keep for good those of every N-th iteration, in spite of --keep-last."""
    save_universal: bool = option(False)
    """With each checkpoint also write DeepSpeed's universal one, for stock DeepSpeed."""
    universal_checkpoint: bool = option(False)
    """Expect a universal checkpoint at --load, as DeepSpeed's scripts say it; any is loaded."""
    pretrained_checkpoint: str | None = option(None)
    """Checkpoint to start from the weights of, when --load has none."""
    use_checkpoint_opt_param_scheduler: bool = option(
        False, flag="--use-checkpoint-opt_param-scheduler"
    )
    """Take learning rate, weight decay and their schedules from the checkpoint's run, whatever the
    flags say."""
    finetune: bool = option(False)
    """Load weights only and start at iteration 0."""
    load_optim: bool = option(True, off="--no-load-optim")
    """Do not load optimizer state."""
    load_rng: bool = option(True, off="--no-load-rng")
    """Do not load random state."""
    save_optim: bool = option(True, off="--no-save-optim")
    """Do not save optimizer state."""
    save_rng: bool = option(True, off="--no-save-rng")
    """Do not save random state."""
    use_checkpoint_args: bool = option(False)
    """Take the model and tokenizer values that no flag gives from the checkpoint at --load."""

    def check(self, resolver: ConfigResolver) -> None:
        """Refuses values that contradict each other.

        Raises:
            ConfigError: naming flags, values and what would be right.
        """
        for name in ("save_interval", "keep_last", "keep_every", "async_save", "save_universal"):
            resolver.check(
                self.save is not None or not getattr(self, name),
                f"{resolver.show(name)} needs --save, the folder to save in",
            )
        resolver.check(
            self.keep_every is None or self.keep_last is not None,
            f"{resolver.show('keep_every')} exempts checkpoints from --keep-last and needs it; "
            "without both, all are kept",
        )
        own = self.checkpoint_format == "safetensors"
        resolver.check(
            own or not self.async_save,
            f"{resolver.show('async_save')} contradicts {resolver.show('checkpoint_format')}: "
            "DeepSpeed "
            "writes its folders while training stands still",
        )
        resolver.check(
            own or self.save_optim,
            f"--no-save-optim contradicts {resolver.show('checkpoint_format')}: DeepSpeed's "
            "folders keep weights and moments together",
        )
