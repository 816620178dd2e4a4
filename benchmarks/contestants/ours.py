"""This trainer, as its command runs it: flags, loader, engine and loop."""

from __future__ import annotations

from typing import Any

import torch

from contestants.registry import AfterStep, Contestant
from contestants.setting import BETAS, CLIP, EPS, LEARNING_RATE, SEED, WEIGHT_DECAY, Setting
from megatron.engine.environment import distributed
from megatron.training.run import build_trainer, parse_run

NEVER = 10**9
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights"
)


def flags_of(setting: Setting, stage: int, extra: tuple[str, ...] = ()) -> list[str]:
    """The command line of the setting."""
    # Without worker processes on a CPU the loader's time is in the process that is measured.
    workers = "--num-workers 0" if not torch.cuda.is_available() else ""
    flags = (
        f"--num-layers {setting.layers} --hidden-size {setting.hidden_size} "
        f"--ffn-hidden-size {setting.ffn_hidden_size} --num-attention-heads {setting.heads} "
        f"--num-query-groups {setting.kv_heads} --seq-length {setting.seq_length} "
        f"--micro-batch-size {setting.micro_batch} "
        f"--global-batch-size {setting.micro_batch * setting.micro_batches} "
        f"--attention-dropout 0 --hidden-dropout 0 --seed {SEED} "
        f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} "
        f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS} --clip-grad {CLIP} "
        f"--tokenizer-type NullTokenizer --vocab-size {setting.vocab_size - 1} --mock-data "
        f"--train-iters {NEVER} --log-interval {NEVER} --eval-iters 0 --peak-tflops 1 "
        f"--zero-stage {stage} {workers} {LLAMA if setting.architecture == 'llama' else ''} "
        f"{'--bf16' if setting.dtype == 'bf16' else ''}"
    )
    return [*flags.split(), *extra]


def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Trains by ``Trainer.fit``."""
    asked = parse_run(None, flags_of(setting, contestant.stage, contestant.flags))
    with distributed(asked.config.parallel) as mesh:
        trainer = build_trainer(asked, mesh)
        step = trainer.engine.train_step

        def train_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            after_step(result.loss)
            return result

        trainer.engine.train_step = train_step  # type: ignore[method-assign]
        trainer.fit()
