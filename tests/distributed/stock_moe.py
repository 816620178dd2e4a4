"""A network with experts as Megatron-DeepSpeed builds it, and a training script with DeepSpeed's
own layer ``deepspeed.moe.layer.MoE``: nothing here is of this project, but for what keeps DeepSpeed
from compiling.

Its parameters have Megatron-DeepSpeed's names, and attention is left out of the sum: only files are
compared.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, INNER, HEADS, LAYERS, LENGTH = 24, 8, 6, 2, 4, 4
EXPERTS = (4, 2)
"""Of the second and the fourth layer."""
KINDS = ("weight", "exp_avg", "exp_avg_sq")
EXPERT = ".deepspeed_experts."


def arguments(residual: bool, interval: int = 2) -> Namespace:
    """Those of the run."""
    return Namespace(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=INNER, num_attention_heads=HEADS,
        seq_length=LENGTH, max_position_embeddings=LENGTH, padded_vocab_size=VOCABULARY,
        num_experts=list(EXPERTS), expert_interval=interval, topk=1, moe_loss_coeff=0.01,
        moe_train_capacity_factor=1.0, moe_eval_capacity_factor=1.0, moe_min_capacity=4,
        moe_token_dropping=True, mlp_type="residual" if residual else "standard",
        enable_expert_tensor_parallelism=False, tensor_model_parallel_size=1,
        make_vocab_size_divisible_by=8,
    )  # fmt: skip


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(HIDDEN, INNER)
        self.dense_4h_to_h = nn.Linear(INNER, HIDDEN)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x_BSH)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.dense = nn.Linear(HIDDEN, HIDDEN)


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(HIDDEN)
        self.self_attention = Attention()
        self.post_attention_layernorm = nn.LayerNorm(HIDDEN)
        self.mlp = mlp


class Encoder(nn.Module):
    def __init__(self, ep: int, residual: bool) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.layers = nn.ModuleList()
        for n in range(LAYERS):
            if n % 2:
                experts = EXPERTS[n // 2]
                options = {"use_residual": residual, "use_rts": False, "min_capacity": 0}
                mlp = MoE(HIDDEN, Mlp(), experts, min(ep, experts), k=1, **options)
            else:
                mlp = Mlp()
            self.layers.append(Layer(mlp))
        self.final_layernorm = nn.LayerNorm(HIDDEN)


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(LENGTH, HIDDEN)


class LanguageModel(nn.Module):
    def __init__(self, ep: int, residual: bool) -> None:
        super().__init__()
        self.embedding, self.encoder = Embedding(), Encoder(ep, residual)


class StockMoE(nn.Module):
    def __init__(self, ep: int, residual: bool) -> None:
        super().__init__()
        self.language_model = LanguageModel(ep, residual)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        embedding, encoder = self.language_model.embedding, self.language_model.encoder
        x = embedding.word_embeddings(tokens_BS) + embedding.position_embeddings.weight
        losses = []
        for layer in encoder.layers:
            attention = layer.self_attention
            qkv = attention.query_key_value(layer.input_layernorm(x))
            x = x + attention.dense(sum(qkv.chunk(3, -1)))
            y = layer.mlp(layer.post_attention_layernorm(x))
            if isinstance(y, tuple):
                y, loss, _ = y
                losses.append(loss)
            x = x + y
        logits = encoder.final_layernorm(x) @ embedding.word_embeddings.weight.t()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens_BS.roll(1).flatten())
        return loss + 0.01 * sum(losses)

    def load_state_dict(self, state_dict: Any, strict: bool = True, **options: Any) -> Any:
        """As Megatron-DeepSpeed's models: nested dictionaries, but experts in the outermost."""
        flat: dict[str, Tensor] = {}

        def add(values: Any, prefix: str) -> None:
            for key, value in values.items():
                if isinstance(value, dict):
                    add(value, f"{prefix}{key}.")
                else:
                    flat[prefix + key] = value

        add(state_dict, "")
        return super().load_state_dict(flat, strict)


def engine_of(ep: int, stage: int, residual: bool) -> Any:
    """DeepSpeed's engine around a random model of this rank."""
    from megatron.engine.environment import prepare_deepspeed

    prepare_deepspeed()
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
    from deepspeed.utils import groups

    for name, value in vars(groups).items():  # of an earlier test in this process
        if name.startswith("_EXPERT") and isinstance(value, dict):
            value.clear()
    if not dist.is_initialized():
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(7 + dist.get_rank())  # each rank has other experts
    model = StockMoE(ep, residual)
    for name, param in model.named_parameters():
        if EXPERT not in name:
            dist.broadcast(param.data, 0)
    group = {"params": list(model.parameters()), "name": "all"}
    params = split_params_into_different_moe_groups_for_optimizer(group)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(params, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def numbered(name: str, ep: int) -> str:
    """A name with the number that an expert of this rank has among all."""
    if EXPERT not in name:
        return name
    head, _, rest = name.partition(EXPERT)
    number, _, tail = rest.partition(".")
    experts = EXPERTS[int(head.split(".layers.")[1].split(".")[0]) // 2]
    ranks = min(ep, experts)
    here = experts // ranks
    return f"{head}{EXPERT}{dist.get_rank() % ranks * here + int(number)}.{tail}"


def train_and_save(folder: str, ep: int, stage: int, residual: bool) -> dict[str, Tensor]:
    """Trains two steps and saves; for the pool. Returns what this rank has, by ``name/kind``."""
    engine = engine_of(ep, stage, residual)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        engine.backward(engine(torch.randint(VOCABULARY, (2, LENGTH), generator=generator)))
        engine.step()
    client = {"args": arguments(residual), "iteration": 2, "checkpoint_version": 3.0}
    engine.save_checkpoint(folder, client_state=client)
    read = state_of(engine, ep, stage)
    engine.destroy()
    return read


def load(folder: str, ep: int, residual: bool) -> dict[str, Tensor]:
    """Loads weights into an engine with other random ones; for the pool."""
    engine = engine_of(ep, 0, residual)
    options = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
    path, client = engine.load_checkpoint(folder, **options)
    assert path is not None and client["args"].num_experts == list(EXPERTS)
    read = state_of(engine, ep, 0)
    engine.destroy()
    return read


def state_of(engine: Any, ep: int, stage: int) -> dict[str, Tensor]:
    """Weights, and with ZeRO moments, of this rank."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if stage:  # it links the states of its groups before the second has any
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    read = {}
    for name, param in engine.module.named_parameters():
        name = numbered(name, ep)
        if not stage:
            read[f"{name}/weight"] = param.detach().clone()
            continue
        read[f"{name}/weight"] = safe_get_full_fp32_param(param).clone()
        for kind in KINDS[1:]:
            read[f"{name}/{kind}"] = safe_get_full_optimizer_state(param, kind).clone()
    return read


def tags(folder: Path) -> list[str]:
    """Names of the files of a save."""
    return sorted(path.name for path in folder.rglob("*.pt"))
