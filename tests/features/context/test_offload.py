"""Activations on the host: the same bits as without, and what is left on the device.

The reference is the same model without offloading. Live bytes are counted by
:class:`live_bytes.LiveBytes`, of which the copies on the host are left out.
"""

import pytest
import torch
from configs import model_config, run_config
from gpt_forward import forward
from live_bytes import LiveBytes
from random_stacks import random_stack

from megatron.config import ConfigError, ParallelConfig
from megatron.features.context import offload as module
from megatron.features.context.flags import LongContextConfig
from megatron.features.context.offload import Offload, offload
from megatron.features.context.partition import DividedInputs
from megatron.parallel.loss_head import Targets
from megatron.parallel.mesh import Group

CPU = torch.device("cpu")
SHAPE = {
    "num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "kv_channels": 8,
    "seq_length": 64, "swiglu": True, "position_embedding_type": "rope",
}  # fmt: skip
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform"}


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 0)


def stack_of(parallel, **flags):
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
    config = model_config(**SHAPE | dropout | flags).with_vocabulary(61, 1)
    return random_stack(config, ParallelConfig(**parallel)).train()


def loss_of(stack, length=64):
    tokens = torch.randint(61, (1, length), generator=torch.Generator().manual_seed(1))
    targets = Targets(tokens.roll(-1, 1), torch.ones(1, length, dtype=torch.float64))
    return forward(stack, tokens, targets=targets, dropout_seed=11)


def gradients(stack):
    stack.zero_grad()
    loss_of(stack).backward()
    return [param.grad for param in stack.parameters()]


@pytest.mark.parametrize(
    "parallel, blocks, inputs",
    [
        ({}, 4, False),
        ({}, 1, False),
        ({"recompute_granularity": "selective"}, 4, False),
        (RECOMPUTED, 0, True),
        (RECOMPUTED | {"recompute_num_layers": 2}, 0, True),
        (RECOMPUTED | {"recompute_method": "block", "recompute_num_layers": 1}, 2, True),
    ],
    ids=["all", "first", "selective", "inputs", "pairs", "both"],
)
def test_gradients_have_the_same_bits(parallel, blocks, inputs):
    reference = gradients(stack_of(parallel))
    stack = stack_of(parallel)
    (offloaded,) = offload([stack.sequence], CPU, blocks, inputs)
    for _ in range(2):  # a second micro batch finds nothing of the first
        assert all(map(torch.equal, gradients(stack), reference))
        assert not offloaded.copies


def kept(parallel, blocks, inputs):
    """Bytes on the device and on the host between forward and backward pass."""
    stack = stack_of(parallel)
    (offloaded,) = offload([stack.sequence], CPU, blocks, inputs)
    with LiveBytes() as live:
        loss = loss_of(stack)
        host = [copy.host for copy in offloaded.copies.values()]
        left = live.bytes(without=host)
    del loss
    return left, sum(map(len, host))


def test_a_quarter_of_the_activations_is_left():
    every, none = kept({}, 0, False)
    left, host = kept({}, 4, False)
    assert none == 0
    assert left < every / 4
    # What was on the device is on the host, but for what none of the blocks has.
    assert 0.9 * (every - left) <= host <= every
    first, _ = kept({}, 1, False)
    assert 0.7 * every < first < 0.85 * every


def test_inputs_of_recomputed_layers_are_on_the_host():
    every, _ = kept(RECOMPUTED, 0, False)
    left, host = kept(RECOMPUTED, 0, True)
    inputs = 4 * 64 * 16 * 8
    assert host == inputs
    assert left == every - inputs


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        return tensors[0] * 1.0

    @staticmethod
    def backward(ctx, grad):
        ctx.tensors = ctx.saved_tensors
        _Saving.seen = ctx.saved_tensors
        return (None,) * len(ctx.tensors)


def test_storages_are_copied_once_and_parameters_never():
    """Views of one storage share its copy, with their strides; a parameter, or a view of one, is
    looked up again: it may have moved, as ZeRO 3 moves it."""
    offloaded, param = Offload(CPU), torch.nn.Parameter(torch.randn(4, 6))
    x = torch.randn(8, 5, requires_grad=True).exp()
    views = (x, x.t(), x[2:4], x.unflatten(0, (2, 4)).transpose(0, 1))
    shapes = [(v.shape, v.stride(), v.clone()) for v in views]
    with offloaded.saving([param], True):
        y = _Saving.apply(*views, param, param.t(), param[1:])
    assert [len(copy.host) for copy in offloaded.copies.values()] == [8 * 5 * 4]
    moved = param.data = param.detach() + 1
    del x, views
    y.sum().backward()
    for seen, (shape, stride, values) in zip(_Saving.seen, shapes, strict=False):
        assert (seen.shape, seen.stride()) == (shape, stride)
        assert torch.equal(seen, values)
    for seen, of in zip(_Saving.seen[4:], (moved, moved.t(), moved[1:]), strict=True):
        assert seen.data_ptr() == of.data_ptr()
        assert torch.equal(seen, of)


def test_a_storage_that_has_changed_is_copied_again():
    offloaded = Offload(CPU)
    x = torch.zeros(4, requires_grad=True) + 1
    with offloaded.saving([], True):
        first = _Saving.apply(x)
        with torch.no_grad():
            x += 1
        second = _Saving.apply(x)
    for y, value in ((first, 1.0), (second, 2.0)):
        y.sum().backward()
        assert _Saving.seen[0].tolist() == [value] * 4


def test_groups_come_back_in_the_order_of_the_backward_pass():
    """When the last group is needed the one before comes with it, and no other."""
    offloaded, xs, ys = Offload(CPU), [], []
    for number in range(3):
        xs.append(torch.randn(4, requires_grad=True).exp())
        with offloaded.saving([], number == 0):
            ys.append(_Saving.apply(xs[-1]))
    copies = list(offloaded.copies.values())
    ys[2].sum().backward()
    assert [copy.bytes is not None for copy in copies] == [False, True, True]
    ys[1].sum().backward()
    assert copies[0].bytes is not None


def test_small_storages_stay(monkeypatch):
    monkeypatch.setattr(module, "SMALLEST", 100)
    offloaded = Offload(CPU)
    with offloaded.saving([], True):
        y = _Saving.apply(torch.ones(24, requires_grad=True) * 1, torch.ones(25))
    assert [len(copy.host) for copy in offloaded.copies.values()] == [100]
    y.sum().backward()


def check(config=None, **flags):
    from megatron.config.flags import ConfigResolver
    from megatron.config.run import PART_FLAGS

    section = LongContextConfig(**flags)
    config = (config or run_config()).with_sections(section)
    resolver = ConfigResolver(tuple(PART_FLAGS.values()), {})
    for name, value in flags.items():
        resolver.put(name, value, "test")
    section.check(config, resolver)
    return resolver.notes


@pytest.mark.parametrize(
    "parallel, flags, words",
    [
        ({}, {"cpu_offloading_num_layers": 3}, "--cpu-offloading for all"),
        (RECOMPUTED, {"cpu_offloading": True}, "give --checkpoint-in-cpu"),
        (
            {},
            {"ds_sequence_parallel_fpdt": True, "ds_sequence_parallel_fpdt_chunk_size": 6},
            "choose a divisor of 8",
        ),
        (
            {"context_parallel_size": 2},
            {"ds_sequence_parallel_fpdt": True, "ds_sequence_parallel_fpdt_chunk_size": 2},
            "choose a multiple of 4",
        ),
        (
            {"context_parallel_size": 2, "cp_comm_type": ("a2a", "p2p")},
            {"ds_sequence_parallel_fpdt": True, "ds_sequence_parallel_fpdt_chunk_size": 4},
            "give --cp-comm-type a2a",
        ),
    ],
)
def test_contradictions_name_the_remedy(parallel, flags, words):
    config = run_config(parallel=ParallelConfig(**parallel))
    with pytest.raises(ConfigError, match=words):
        check(config, **flags)


def test_deepspeed_section():
    """DeepSpeed's keys; those that change nothing get a note, others an error."""
    json = '{"partition_activations": true, "cpu_checkpointing": true, "number_checkpoints": 4}'
    flags = LongContextConfig(activation_checkpointing=json)
    flags.check_section()
    assert flags.in_host_memory
    notes = check(activation_checkpointing=json)
    assert "without --recompute-granularity full" in notes[0]
    assert "partition_activations changes nothing: it is for the inputs of" in notes[1]
    assert not LongContextConfig(
        activation_checkpointing='{"enabled": false, "cpu_checkpointing": true}'
    ).in_host_memory
    for wrong in ('{"cpu_checkpoint": true}', '{"profile": 1}', '{"number_checkpoints": true}'):
        with pytest.raises(ConfigError, match="cpu_checkpointing|true or false|checkpoints or"):
            LongContextConfig(activation_checkpointing=wrong).check_section()


def test_parts_of_views_of_one_tensor():
    """Views share storage and version, and each has a part of its own."""
    divided = DividedInputs(Group((0, 1), rank=1))
    pack, _ = divided.around(lambda x: x, lambda x: x)
    first, second = torch.arange(16.0).split(8)
    parts = [pack(x).kept for x in (first, second, first.view(2, 4).t(), first)]
    assert [part.tolist() for part in parts] == [
        [4, 5, 6, 7], [12, 13, 14, 15], [2, 6, 3, 7], [4, 5, 6, 7],
    ]  # fmt: skip
    assert parts[3] is parts[0]
