"""Runs that continue from folders of other trainers, against the next step of these: of DeepSpeed's
engine, which transformers' Trainer saves by, and of torch's AdamW under FSDP2."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from fuzz.readers.checkpoints import CONFIG, weights
from training_jobs import train

from megatron.checkpoint.source import open_checkpoint
from megatron.data.loader import MicroBatches
from megatron.run.run import parse_run, run_data

RATE, DECAY, BEFORE = 1e-2, 0.1, 3
FLAGS = (
    "--use-checkpoint-args --tokenizer-type NullTokenizer --vocab-size 31 --mock-data --num-workers"
    " 0 --eval-iters 0 --seq-length 16 --global-batch-size 4 --micro-batch-size 2 --train-iters 4 "
    f"--lr {RATE} --lr-decay-style constant --weight-decay {DECAY} --adam-beta2 0.95 --clip-grad 0 "
    "--peak-tflops 1 --log-interval 1000"
).split()


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation="eager"))
    model.load_state_dict({name: 0.2 * values for name, values in weights().items()})
    return model


def adam(model):
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))


def batches(last):
    """Tokens and labels [4, 16] of the steps, of which a run here takes the last."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(31, (BEFORE, 4, 17), generator=generator)
    return [*((each[:, :-1], each[:, 1:]) for each in drawn), last]


def loss_of(model, batch):
    logits = model(batch[0]).logits
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def by_deepspeed(stage, folder, steps):
    """Trains, saves before the last step, and returns the weights after it; for the pool."""
    import torch.distributed as dist

    from megatron.engine.environment import prepare_deepspeed

    prepare_deepspeed()
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = llama()
    names = {param: name for name, param in model.named_parameters()}
    optimizer = adam(model)
    settings = {
        "train_batch_size": 4, "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=settings, lr_scheduler=schedule
    )
    for number, batch in enumerate(steps):
        if number == BEFORE:
            engine.save_checkpoint(folder)
        mine = [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch]
        engine.backward(loss_of(engine, mine))
        engine.step()
    after = {name: safe_get_full_fp32_param(param).clone() for param, name in names.items()}
    engine.destroy()
    return after


def by_fsdp(_, folder, steps):
    """The same by FSDP2, as torch saves it, and as accelerate, in two folders; for the pool. In one
    job: of a second one in workers whose ranks have changed, torch saved half of the chunks."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = adam(model)
    for number, batch in enumerate(steps):
        if number == BEFORE:
            module, state = get_state_dict(model, optimizer)
            dcp.save({"model": module, "optim": state}, checkpoint_id=f"{folder}/torch")
            dcp.save({"model": module}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
            dcp.save({"optimizer": state}, checkpoint_id=f"{folder}/optimizer_0")
        optimizer.zero_grad()
        loss_of(model, [part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch])\
            .backward()  # fmt: skip
        optimizer.step()
    after = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    dist.destroy_process_group()
    return after


PROGRAMS = {
    "zero1": (by_deepspeed, 1), "zero2": (by_deepspeed, 2), "zero3": (by_deepspeed, 3),
    "fsdp2": (by_fsdp, None),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_next_step_is_that_of_the_program(name, pool, tmp_path):
    """To 1e-6: two implementations sum products in other orders, and Adam's moments of three steps
    bound what that changes. Without moments, weights differ by more than 1e-3."""
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    program, kind = PROGRAMS[name]
    placeholder = tmp_path / "weights"
    shutil.copytree(folder, placeholder)
    llama().save_pretrained(placeholder)
    run = parse_run(None, ["--load", str(placeholder), *FLAGS])
    data = run_data(run)
    batch = next(MicroBatches(data.datasets.train, data.collate, micro_batch_size=4))
    if program is by_deepspeed:  # it counts its samples, so that data continue behind them
        samples = MicroBatches(
            data.datasets.train, data.collate, micro_batch_size=4, consumed_samples=4 * BEFORE
        )
        batch = next(samples)
    steps = batches((batch.tokens_BS, batch.labels_BS))
    after = pool.run(2, program, kind, str(folder), steps)[0]
    if program is by_fsdp:
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": BEFORE}))
    with torch.no_grad():
        model = llama()
        model.load_state_dict(after)
        model.save_pretrained(tmp_path / "after")
    there = open_checkpoint(tmp_path / "after")
    for load in (folder, folder / "torch") if program is by_fsdp else (folder,):
        state, save = open_checkpoint(load).state, tmp_path / f"from-{load.name}"
        assert (state["iteration"], state["optimizer_step"]) == (BEFORE, BEFORE)
        (record, *_) = pool.run(1, train, ["--load", str(load), *FLAGS, "--save", str(save)])
        assert record.iteration == BEFORE + 1 and len(record.losses) == 1
        here = open_checkpoint(save)
        for each in there.names():
            torch.testing.assert_close(here.tensor(each), there.tensor(each), rtol=0, atol=1e-6)
