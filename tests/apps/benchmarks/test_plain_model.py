"""The plain model of the benchmarks is the same model: loss and gradients, against the trainer's
layers and against transformers."""

import dataclasses

import pytest
import torch
from contestants import hf
from contestants.flags import flags_of
from contestants.plain import MainWeights, build
from contestants.prepare import write_weights
from contestants.setting import Setting
from gpt_forward import forward

from megatron.parallel.shard import shard_of
from megatron.run.run import parse_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def setting(request, tmp_path_factory) -> Setting:
    return Setting(
        layers=2,
        hidden_size=32,
        heads=4,
        kv_heads=4 if request.param == "gpt2" else 2,
        ffn_hidden_size=64,
        seq_length=12,
        vocab_size=128,
        micro_batch=2,
        micro_batches=1,
        architecture=request.param,
        dtype="fp32",
        threads=1,
        warmup=1,
        steps=1,
        folder=str(tmp_path_factory.mktemp(request.param)),
    )


@pytest.fixture(scope="module")
def run(setting):
    result = parse_run(None, flags_of(setting, 0))
    write_weights(setting, result)
    return result


@pytest.fixture(scope="module")
def batch(setting):
    torch.manual_seed(0)
    shape = (setting.micro_batch, setting.seq_length + 1)
    tokens_BT = torch.randint(setting.vocab_size, shape)
    return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()


def test_against_transformers(setting, run, batch):
    plain, theirs = build(setting, CPU), hf.load_model(setting, torch.float32, CPU)
    loss, expected = plain(*batch), theirs(**hf.inputs("gpt", *batch)).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    mine, other = (
        torch.stack([p.grad.norm() for p in m.parameters()]).norm() for m in (plain, theirs)
    )
    torch.testing.assert_close(mine, other)
    table = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(plain.tokens.weight.grad, table)


def test_against_the_trainers_layers(setting, run, batch):
    from megatron.families import build_model
    from megatron.model.layer_list import initialise

    plain, ours = build(setting, CPU), build_model(run.config.model)
    for name, param in ours.canonical_parameters():
        initialise(name, param, run.config.training.seed)
    loss = plain(*batch)
    logits_BSV = forward(ours, batch[0])[..., : setting.vocab_size]
    expected = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), batch[1].flatten())
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    grads = {name: shard_of(p).join([p.grad]) for name, p in ours.canonical_parameters()}
    pairs = (("tokens", "embedding.word_embeddings"), ("blocks.1.down", "layers.1.mlp.down"))
    for mine, name in pairs:
        torch.testing.assert_close(
            plain.get_submodule(mine).weight.grad, grads[f"{name}.weight"], rtol=1e-4, atol=1e-7
        )


def test_main_weights_are_adamw_in_float32(setting, run, batch):
    """Two steps in bf16 on float32 copies, against AdamW given the same gradients."""
    model = build(dataclasses.replace(setting, dtype="bf16"), CPU)
    optimizer = MainWeights(model)
    before = [main.clone() for main in optimizer.main]
    reference = [torch.nn.Parameter(main.clone()) for main in optimizer.main]
    adam = torch.optim.AdamW(
        [
            {"params": [p for p in reference if p.dim() > 1], "weight_decay": 0.01},
            {"params": [p for p in reference if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=1e-4,
    )
    for _ in range(2):
        model(*batch).backward()
        for param, half in zip(reference, optimizer.params, strict=True):
            param.grad = half.grad.float()
        torch.nn.utils.clip_grad_norm_(reference, 1.0)
        adam.step()
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())
    for main, param, half, start in zip(
        optimizer.main, reference, optimizer.params, before, strict=True
    ):
        torch.testing.assert_close(main, param.data, rtol=1e-6, atol=1e-9)
        assert torch.equal(half, main.bfloat16())
        assert not torch.equal(main, start)
