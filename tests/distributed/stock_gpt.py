"""A GPT and a training script as users write them who have only torch and stock DeepSpeed.

Its parameters have the canonical names. Nothing here is of this project, but for what keeps
DeepSpeed from compiling.

Letters: B batch, S sequence, H hidden, V vocabulary (of a rank), N heads (of a rank), D head width.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, INNER, HEADS, GROUPS, LAYERS, LENGTH = 100, 32, 40, 4, 2, 2, 16
WIDTH = HIDDEN // HEADS
FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {INNER} "
    f"--num-attention-heads {HEADS} --num-query-groups {GROUPS} --seq-length {LENGTH} --swiglu "
    "--make-vocab-size-divisible-by 8"
).split()
"""Flags of this network for the trainer; its table has 104 rows, 112 over two ranks."""
RATE, DECAY = 3e-3, 0.1


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(grad := grad.contiguous(), group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x := x.clone(), group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size, rank = dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
        return grad.chunk(size, -1)[rank].contiguous(), None


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int, cut_bias: bool, cut: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.weight.tensor_model_parallel = cut
        self.bias.tensor_model_parallel = cut and cut_bias


class Attention(nn.Module):
    def __init__(self, tp: int, group: Any) -> None:
        super().__init__()
        self.tp, self.group = tp, group
        rows = (HEADS + 2 * GROUPS) * WIDTH // tp
        self.qkv = Linear(HIDDEN, rows, True, tp > 1)
        self.proj = Linear(HIDDEN // tp, HIDDEN, False, tp > 1)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = _Enter.apply(x_BSH, self.group) if self.tp > 1 else x_BSH
        heads, groups = HEADS // self.tp, GROUPS // self.tp
        y = F.linear(x_BSH, self.qkv.weight, self.qkv.bias).unflatten(-1, (-1, WIDTH))
        q_BNSD, k_BNSD, v_BNSD = y.transpose(1, 2).split([heads, groups, groups], 1)
        y = F.scaled_dot_product_attention(q_BNSD, k_BNSD, v_BNSD, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).flatten(2) @ self.proj.weight.t()
        return (_Leave.apply(y, self.group) if self.tp > 1 else y) + self.proj.bias


class Mlp(nn.Module):
    def __init__(self, tp: int, group: Any) -> None:
        super().__init__()
        self.tp, self.group = tp, group
        self.up = Linear(HIDDEN, 2 * INNER // tp, True, tp > 1)
        self.down = Linear(INNER // tp, HIDDEN, False, tp > 1)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = _Enter.apply(x_BSH, self.group) if self.tp > 1 else x_BSH
        gate, up = F.linear(x_BSH, self.up.weight, self.up.bias).chunk(2, -1)
        y = (F.silu(gate) * up) @ self.down.weight.t()
        return (_Leave.apply(y, self.group) if self.tp > 1 else y) + self.down.bias


class Layer(nn.Module):
    def __init__(self, tp: int, group: Any) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.mlp = Attention(tp, group), Mlp(tp, group)

    def forward(self, x_BSH: Tensor) -> Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        return x_BSH + self.mlp(self.mlp_norm(x_BSH))


class Embedding(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(rows, HIDDEN)
        self.position_embeddings = nn.Embedding(LENGTH, HIDDEN)


class FinalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)


class Gpt(nn.Module):
    def __init__(self, rows: int, tp: int = 1, rank: int = 0, group: Any = None) -> None:
        super().__init__()
        self.tp, self.group, self.first = tp, group, rank * (rows // tp)
        self.embedding = Embedding(rows // tp)
        self.embedding.word_embeddings.weight.tensor_model_parallel = tp > 1
        self.layers = nn.ModuleList(Layer(tp, group) for _ in range(LAYERS))
        self.final_norm = FinalNorm()

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Mean loss of predicting each token from those before it."""
        table_VH = self.embedding.word_embeddings.weight
        local_BS = tokens_BS[:, :-1] - self.first
        here_BS = (local_BS >= 0) & (local_BS < table_VH.shape[0])
        x_BSH = F.embedding(local_BS * here_BS, table_VH) * here_BS[..., None]
        x_BSH = _Leave.apply(x_BSH, self.group) if self.tp > 1 else x_BSH
        x_BSH = x_BSH + self.embedding.position_embeddings.weight
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        x_BSH = self.final_norm.norm(x_BSH)
        x_BSH = _Enter.apply(x_BSH, self.group) if self.tp > 1 else x_BSH
        logits_BSV = x_BSH @ table_VH.t()
        logits_BSV = _Gather.apply(logits_BSV, self.group) if self.tp > 1 else logits_BSV
        return F.cross_entropy(
            logits_BSV[..., :VOCABULARY].flatten(0, 1), tokens_BS[:, 1:].flatten()
        )


class Mpu:
    """What DeepSpeed asks of a layout with tensor-parallel ranks only."""

    def __init__(self, model: Any, data: Any) -> None:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        for kind, group in {
            "data": data,
            "model": model,
            "tensor_model": model,
            "slice": model,
            "pipeline_model": alone[dist.get_rank()],
        }.items():
            prefix = f"get_{kind}_parallel"
            setattr(self, f"{prefix}_group", lambda group=group: group)
            setattr(self, f"{prefix}_rank", lambda group=group: dist.get_rank(group))
            setattr(self, f"{prefix}_world_size", lambda group=group: dist.get_world_size(group))


def tokens(step: int) -> Tensor:
    """The batch of a step: [4, LENGTH + 1]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decays: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, param in model.named_parameters():
        decays[name.endswith("weight") and "norm" not in name].append(param)
    groups = [
        {"params": decays[True], "weight_decay": DECAY},
        {"params": decays[False], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.5, 0.6), eps=1e-4)


def continue_training(
    folder: str, stage: int, rows: int, tp: int, steps: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Loads a universal checkpoint with stock DeepSpeed and trains on; for the pool.

    Returns:
        The losses, and this rank's (part of) weights and moments right after loading, by
        ``name/kind``: at stage 3 flat and padded to what the ranks hold, else in shape.
    """
    from megatron.engine.environment import prepare_deepspeed

    prepare_deepspeed()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    world, rank = dist.get_world_size(), dist.get_rank()
    models = [dist.new_group(range(s, s + tp)) for s in range(0, world, tp)]
    datas = [dist.new_group(range(s, world, tp)) for s in range(tp)]
    model_group, data_group = models[rank // tp], datas[rank % tp]
    settings = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 4 * tp // world,
        "zero_optimization": {"stage": stage},
        "checkpoint": {"load_universal": True},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    init = contextlib.nullcontext()
    if stage == 3:
        init = deepspeed.zero.Init(config_dict_or_path=settings)
    with init:
        model = Gpt(rows, tp, rank % tp, model_group)
    mpu = Mpu(model_group, data_group) if tp > 1 else None
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer_of(model), config=settings, mpu=mpu
    )
    path, client = engine.load_checkpoint(str(Path(folder).parent))
    assert path is not None and client["iteration"] == engine.global_steps
    held = {}
    for name, param in model.named_parameters():
        held[f"{name}/weight"] = safe_get_full_fp32_param(param).clone()
        for kind in ("exp_avg", "exp_avg_sq"):
            held[f"{name}/{kind}"] = safe_get_full_optimizer_state(param, kind).clone()
    if stage == 3:
        # Stock DeepSpeed gives all groups one step counter, which each group's update raises.
        for state in engine.optimizer.optimizer.state.values():
            state["step"] = state["step"].clone()
    losses = []
    share = 4 * tp // world
    first = rank // tp * share
    for step in range(steps):
        loss = engine(tokens(step)[first : first + share])
        engine.backward(loss)
        engine.step()
        dist.all_reduce(total := loss.detach().clone(), group=data_group)
        losses.append(float(total) / dist.get_world_size(data_group))
    engine.destroy()
    return losses, held


def continue_plainly(
    values: dict[str, Tensor], done: int, steps: int, rows: int
) -> tuple[list[float], Gpt]:
    """The same by torch alone, from whole tensors by ``name/kind``."""
    model = Gpt(rows)
    optimizer = optimizer_of(model)
    for group in optimizer.param_groups:
        group["betas"], group["eps"] = (0.9, 0.999), 1e-8  # as the checkpoint's run had them
    for name, param in model.named_parameters():
        whole = {
            kind: F.pad(values[f"{name}/{kind}"], (0, 0, 0, rows - VOCABULARY))
            if "word" in name
            else values[f"{name}/{kind}"].clone()
            for kind in ("weight", "exp_avg", "exp_avg_sq")
        }
        param.data.copy_(whole.pop("weight"))
        optimizer.state[param] = {"step": torch.tensor(float(done)), **whole}
    losses = []
    for step in range(steps):
        loss = model(tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, model
