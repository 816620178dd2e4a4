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
from contestants.registry import AfterStep, Contestant
from contestants.setting import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY, Setting


def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Trains by ``DPOTrainer.train``; the reference's log-probabilities are computed before the
    first step, or, as is its default, in every step."""
    cuda = torch.cuda.is_available()
    arguments = DPOConfig(
        output_dir=setting.folder,  # nothing is written
        bf16=setting.dtype == "bf16",
        use_cpu=not cuda,
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=setting.micro_batches,
        gradient_checkpointing=False,
        precompute_ref_log_probs=not contestant.reference,
        max_length=setting.seq_length + 1,
        max_steps=10**9 // (setting.micro_batch * setting.micro_batches),
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        dataloader_num_workers=0,
        dataloader_pin_memory=cuda,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
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
        processing_class=AutoTokenizer.from_pretrained(setting.weights),
    )

    class Told(TrainerCallback):
        """Tells of each optimizer step."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            loss, trainer.total = trainer.total, 0.0
            after_step(loss / setting.micro_batches)

    trainer.add_callback(Told())
    trainer.train()
