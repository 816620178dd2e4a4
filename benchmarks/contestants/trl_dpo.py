"""trl's `DPOTrainer` with `bf16=True`: autocast over float32 weights, fused AdamW. Its activations
are kept, as this trainer's are, where its default would compute them twice."""

from __future__ import annotations

import json
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

from contestants import hf
from contestants.hf_trainer import shared_arguments
from contestants.registry import AfterStep, Contestant
from contestants.setting import Setting


def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Trains by ``DPOTrainer.train``; the reference's log-probabilities are computed before the
    first step, or, as is its default, in every step."""
    cuda = torch.cuda.is_available()
    arguments = DPOConfig(
        **shared_arguments(setting),
        gradient_checkpointing=False,
        precompute_ref_log_probs=not contestant.reference,
        max_length=setting.seq_length + 1,
    )
    device = torch.device("cuda" if cuda else "cpu")

    class Watched(DPOTrainer):
        """Keeps each step's loss where it is."""

        total: Any = 0.0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            self.total = self.total + loss.detach()
            return result

    trainer = Watched(
        model=hf.load_model(setting, torch.float32, device),
        args=arguments,
        train_dataset=Dataset.from_list(
            [json.loads(line) for line in setting.pairs.read_text().splitlines()]
        ),
        processing_class=AutoTokenizer.from_pretrained(setting.weights, trust_remote_code=False),
    )

    class Told(TrainerCallback):
        """Tells of each optimizer step."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            loss, trainer.total = trainer.total, 0.0
            after_step(loss / setting.micro_batches)

    trainer.add_callback(Told())
    trainer.train()
