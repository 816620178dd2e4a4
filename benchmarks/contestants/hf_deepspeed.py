"""A model of `transformers` in DeepSpeed's engine, as its documentation shows it: ZeRO 1, or ZeRO 3
with an offloaded optimizer, torch's fused AdamW or DeepSpeed's, the model's own loss."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch

from contestants import hf
from contestants.inputs import batches
from contestants.registry import AfterStep, Contestant
from contestants.setting import BETAS, CLIP, EPS, LEARNING_RATE, Setting


def run(contestant: Contestant, setting: Setting, after_step: AfterStep) -> None:
    """Trains by ``engine.backward`` and ``engine.step``."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed
    import deepspeed.ops

    if device.type == "cpu":
        # Its collectives for CPUs are compiled when it starts; one process has no use for them.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    bf16 = setting.dtype == "bf16"
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setting.micro_batch,
        "gradient_accumulation_steps": setting.micro_batches,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": contestant.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**62,
    }
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = hf.load_model(setting, dtype, device, contestant.experts)
    if contestant.adam:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    groups, rates = hf.parameter_groups(model), {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS}
    optimizer: torch.optim.Optimizer
    if contestant.adam == "cpuadam":
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(groups, **rates)
    else:
        optimizer = torch.optim.AdamW(groups, **rates, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = batches(setting, device)
    while True:
        total = 0.0
        for _ in range(setting.micro_batches):
            loss = engine(**hf.inputs(setting.family, *next(data))).loss
            engine.backward(loss)
            engine.step()
            total = total + loss.detach()
        after_step(total / setting.micro_batches)
