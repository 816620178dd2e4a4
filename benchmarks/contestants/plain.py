"""Plain PyTorch: the minimal model, its gradients in the weights' format, float32 main weights and
fused AdamW; eager, or with model and loss compiled whole."""

from __future__ import annotations

import torch
from torch import Tensor

from contestants.hf import parameter_groups
from contestants.inputs import batches
from contestants.plain_bert import BERT
from contestants.plain_model import GPT
from contestants.plain_t5 import T5
from contestants.plain_weights import plain_weights
from contestants.registry import AfterStep, Contestant
from contestants.setting import BETAS, CLIP, EPS, LEARNING_RATE, SEED, Setting

MODELS = {"gpt": GPT, "bert": BERT, "t5": T5}


def build(setting: Setting, device: torch.device) -> GPT | BERT | T5:
    """The model on ``device`` in the setting's dtype."""
    kind = MODELS[setting.family]
    if setting.shared_weights:
        with torch.device("cpu" if setting.folder else device):
            model = kind(setting)
        model.load_state_dict(plain_weights(setting, device))
    else:
        torch.manual_seed(SEED)
        with torch.device(device):
            model = kind(setting)
        model.initialise()
    return model.to(device, torch.bfloat16 if setting.dtype == "bf16" else torch.float32)


class MainWeights:
    """AdamW on float32 copies of half-precision weights; on the weights themselves in float32.

    The numerics of ZeRO in bf16: gradients in bf16, cast to float32, clipped, float32 moments.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        groups = parameter_groups(model)
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.half = self.params[0].dtype != torch.float32
        if self.half:
            for group in groups:
                group["params"] = [p.detach().float() for p in group["params"]]
        self.main: list[Tensor] = [p for group in groups for p in group["params"]]
        self.adam = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)

    def step(self) -> None:
        """Clips, updates and takes the gradients away."""
        if self.half:
            for main, param in zip(self.main, self.params, strict=True):
                assert param.grad is not None
                main.grad, param.grad = param.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.main, CLIP, foreach=True)
        self.adam.step()
        self.adam.zero_grad()
        if self.half:
            with torch.no_grad():
                torch._foreach_copy_(self.params, self.main)


def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Trains."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = build(setting, device)
    optimizer = MainWeights(model)
    forward = torch.compile(model) if contestant.compiled else model
    data = batches(setting, device)
    while True:
        total = torch.zeros((), device=device)
        for _ in range(setting.micro_batches):
            loss = forward(*next(data))
            (loss / setting.micro_batches).backward()
            total += loss.detach()
        optimizer.step()
        after_step(total / setting.micro_batches)
