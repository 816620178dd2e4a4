"""The `Trainer` of `transformers` with `bf16=True`: autocast over float32 weights, fused AdamW."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from contestants import hf
from contestants.inputs import Samples
from contestants.registry import AfterStep, Contestant
from contestants.setting import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY, Setting


class Repeated(Dataset):
    """The samples, over and over."""

    def __init__(self, setting: Setting) -> None:
        self.family, self.samples = setting.family, Samples(setting)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index % len(self.samples)]
        tensors = (torch.from_numpy(np.asarray(each, dtype=np.int64)) for each in sample)
        return hf.inputs(self.family, *tensors)


class InOrder(Trainer):
    """Reads the samples in order, and keeps each step's loss where it is."""

    total: Any = 0.0

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        assert isinstance(self.train_dataset, Repeated)
        return range(len(self.train_dataset))

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own loss, over the tokens of the whole step."""
        result = super().compute_loss(*args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        self.total = self.total + loss.detach()
        return result


def shared_arguments(setting: Setting) -> dict[str, Any]:
    """Arguments of every trainer of this kind: what is trained how, and nothing is written."""
    cuda = torch.cuda.is_available()
    return dict(
        output_dir=setting.folder or tempfile.gettempdir(),  # nothing is written
        bf16=setting.dtype == "bf16",
        use_cpu=not cuda,
        per_device_train_batch_size=setting.micro_batch,
        gradient_accumulation_steps=setting.micro_batches,
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


def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Trains by ``Trainer.train``."""
    cuda = torch.cuda.is_available()
    arguments = TrainingArguments(**shared_arguments(setting), remove_unused_columns=False)
    device = torch.device("cuda" if cuda else "cpu")
    model = hf.load_model(setting, torch.float32, device)
    trainer = InOrder(model=model, args=arguments, train_dataset=Repeated(setting))

    class Told(TrainerCallback):
        """Tells of each optimizer step."""

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            # With num_items_in_batch a micro batch's loss is its share of the step's.
            loss, trainer.total = trainer.total, 0.0
            after_step(loss)

    trainer.add_callback(Told())
    trainer.train()
