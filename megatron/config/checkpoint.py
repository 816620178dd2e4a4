"""Where to save and load, how often, and what."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import option


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
    save_interval: int | None = option(None)
    """Steps between saves; the last step is always saved."""
    checkpoint_format: str = option("safetensors", choices=("safetensors", "deepspeed"))
    """This project's own files, which any layout and --load take, or DeepSpeed's own."""
    async_save: bool = option(False)
    """Copy the state to host memory and write it while training goes on."""
    keep_last: int | None = option(None)
    """Keep only so many of the newest checkpoints."""
    keep_every: int | None = option(None)
    """Keep for good those of every so-manieth iteration, in spite of --keep-last."""
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
