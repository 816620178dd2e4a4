"""Plans of divided sequences, of tiles, and of host memory: against the attention itself, against
tensors that exist in a step, and against the arithmetic of one long sequence."""

import dataclasses

import pytest
import torch
from gpt_forward import forward
from peak_bytes import PeakBytes
from tool_modules import load_program

from megatron.apps.parity.layouts import parse_layout
from megatron.apps.planning.activations import activation_bytes
from megatron.apps.planning.memory import peak_memory, rank_memory, state_bytes
from megatron.apps.planning.parameters import rank_shares
from megatron.apps.planning.search import Workload, estimate, layouts, search
from megatron.apps.planning.step_time import Hardware, rank_flops, step_time
from megatron.config import ModelFlags, ParallelConfig
from megatron.config.layouts import Layout
from megatron.families import build_model, family_of
from megatron.features.context.costs import (
    GROUPS_ON_DEVICE,
    Heads,
    attention_bytes,
    attention_widths,
    lengths_of_rank,
)
from megatron.features.context.exchange import HeadExchange, Ring
from megatron.features.context.flags import LongContextConfig
from megatron.features.context.host import chunk_attention
from megatron.features.context.offload import offload
from megatron.features.context.tiles import tile_mlps
from megatron.kernels import cpu_kernels
from megatron.model.flops import TransformerShape
from megatron.parallel.context import Context
from megatron.parallel.loss_head import Targets
from megatron.parallel.mesh import Group

LENGTH = 4096
TILED = LongContextConfig(mlp_chunks_for_training=16)
ON_HOST = dataclasses.replace(TILED, checkpoint_in_cpu=True)
IN_CHUNKS = dataclasses.replace(
    ON_HOST, ds_sequence_parallel_fpdt=True, ds_sequence_parallel_fpdt_chunk_size=512,
    ds_sequence_parallel_fpdt_offloading=True,
)  # fmt: skip


def step_of(model, dtype, saving):
    """A forward and a backward pass of a model that recomputes its blocks."""
    parallel = ParallelConfig(recompute_granularity="full", recompute_method="uniform")
    stack = build_model(model, parallel).to(dtype)
    for param in stack.parameters():
        torch.nn.init.normal_(param, std=0.02)
        param.grad = torch.zeros_like(param)
    if saving.tiles:
        width = model.hidden_size
        tile_mlps(stack.blocks(), lambda length, whole: saving.tile(length, whole, width, 1))
    if saving.ds_sequence_parallel_fpdt:
        chunk_attention(stack.blocks(), saving.ds_sequence_parallel_fpdt_chunk_size, on_host=True)
    if saving.in_host_memory:
        offload([stack.sequence], torch.device("cpu"), 0, True)
    ids_BS = torch.randint(61, (1, model.seq_length + 1))

    def step() -> None:
        targets = Targets(ids_BS[:, 1:], torch.ones(1, model.seq_length))
        forward(stack, ids_BS[:, :-1], targets=targets).backward()

    return step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("saving", [TILED, ON_HOST, IN_CHUNKS], ids=["tiles", "host", "chunks"])
@pytest.mark.proof
def test_a_step_against_tensors_that_exist(monkeypatch, small, saving, dtype):
    """All tensors of forward and backward pass, no more than planned, and within 10 percent of it,
    with chunks 25. On a CPU what comes back from the host takes no further memory."""
    monkeypatch.setattr(cpu_kernels, "suits", lambda *_: False)
    wide = {"seq_length": LENGTH, "max_position_embeddings": LENGTH, "ffn_hidden_size": 224}
    model = small("llama", **wide)
    step = step_of(model, dtype, saving)
    step()  # tables of positions exist from now on
    peak = PeakBytes()
    with peak, peak.host_copies():
        step()
    precision = "fp32" if dtype == torch.float32 else "bf16"
    layout = Layout(precision=precision, recompute="uniform", zero=1)
    planned = peak_memory(model, layout, 1, 1, saving=saving)
    hidden = LENGTH * model.hidden_size * dtype.itemsize
    expected = planned.activations - (GROUPS_ON_DEVICE * hidden if saving.in_host_memory else 0)
    least = 0.75 if saving is IN_CHUNKS else 0.9
    assert least * expected <= peak.peak <= expected
    # Inputs of blocks, and queries, keys, values (half as wide each) and output of one.
    on_host = {TILED: 0, ON_HOST: model.num_layers, IN_CHUNKS: model.num_layers + 3}[saving]
    assert peak.host_peak == planned.host == on_host * hidden


NAMES = ["cp2", "cp4", "cp2-a2a", "cp4-a2a", "cp4-a2a+p2p", "cp2-allgather", "cp8-allgather"]
HEADS = Heads(queries=8, keys=2, width=16)


@pytest.mark.parametrize("recompute", ["", "-uniform"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_against_what_is_exchanged(monkeypatch, name, recompute):
    """Return the collectives that attention starts on every rank, with the elements that each
    sends."""
    layout = parse_layout(name + recompute)
    sent = [count_sent(monkeypatch, layout, rank) for rank in range(layout.context)]
    passes = 3 if recompute else 2
    rings, collectives = attention_bytes(layout, HEADS, tokens=2 * 64, element=2)
    assert rings + collectives == max(passes * keys * 2 + grads * 4 for keys, grads in sent)
    assert (rings > 0) == (name in ("cp2", "cp4", "cp4-a2a+p2p"))


def count_sent(monkeypatch, layout, rank) -> tuple[float, float]:
    """Elements that a rank sends to others in a forward pass, and of gradients of keys, which are
    in float32, in a backward pass."""
    from megatron.features.context import exchange

    ranks, batch, tokens = layout.context, 2, 64
    context = Context(Group(tuple(range(ranks)), rank))
    kind = (layout.comm or ("p2p",))[0]
    counted: list[int] = []

    def start(x, sent, received, group):
        counted.append(sum(n for other, n in enumerate(sent) if other != rank))
        return lambda: x.new_zeros(sum(received))

    def gather(x, group):
        counted.append(x.numel() * (ranks - 1))
        return lambda: x.new_zeros(ranks * len(x), *x.shape[1:])

    def scatter(x, group):
        counted.append(x.numel() // ranks * (ranks - 1))
        return lambda: x.new_zeros(len(x) // ranks, *x.shape[1:])

    monkeypatch.setattr(exchange, "start_exchange", start)
    monkeypatch.setattr(exchange, "start_gather", gather)
    monkeypatch.setattr(exchange, "start_scatter", scatter)
    q, k, v = (torch.zeros(batch, heads, tokens, HEADS.width) for heads in (8, 2, 2))
    exchanging = {"a2a": ranks, "a2a+p2p": layout.exchanging}.get(kind, 1)
    if exchanging > 1:
        heads = HeadExchange(context, exchanging)
        q, k, v = heads.scatter_heads(q, k, v)
        heads.gather_heads(q)
    rings = ranks // exchanging
    if kind == "allgather":
        exchange.gather(context, k, v)
    elif rings > 1:
        length = tokens * ranks

        def sees(queries, keys):
            return any(keys[0] < end for _, end in queries)

        ring = Ring(context, exchanging, sees, length, length)
        ring.forward(k, v, lambda block: None)
    forward_elements = sum(counted)
    counted.clear()
    grads = 0.0
    if kind == "allgather":
        exchange.scatter_gradients(context, *(x.repeat(1, 1, ranks, 1) for x in (k, v)))
        grads = sum(counted)
    elif rings > 1:
        ring.backward(k, v, lambda block: (block.k.float(), block.v.float()))
        grads = sum(counted) - (forward_elements - exchanged(q, HEADS, ranks, exchanging))
    return forward_elements, grads


def exchanged(q, heads, ranks, exchanging) -> float:
    """Elements of the exchange of heads in a forward pass, which the ring does not repeat."""
    if exchanging == 1:
        return 0
    tokens = q.numel() / (heads.queries // exchanging * heads.width) / exchanging
    both = 2 * heads.queries + 2 * heads.sent_keys(exchanging)
    return tokens * both * heads.width * (exchanging - 1) / exchanging


@pytest.mark.parametrize("name", ["cp2", "cp4-a2a", "tp2-sp-cp2", "pp2-cp2"])
def test_a_rank_has_its_part_of_the_work_and_of_the_tokens(small, name):
    """Share of the FLOPs of one rank without the axis; activations of as many tokens, except tables
    of the whole sequence."""
    layout = parse_layout(f"{name}-bf16-zero1")
    model = small("llama", layout.tensor)
    alone = dataclasses.replace(layout, context=1, comm=())
    flops = []
    for each in (layout, alone):
        flops.append([rank_flops(model, each, 2, share) for share in rank_shares(model, each)])
    assert flops[0] == pytest.approx([whole / layout.context for whole in flops[1]])
    kept = activation_bytes(model, layout, 2).hidden, activation_bytes(model, alone, 2).hidden
    assert kept[0] == kept[1] / layout.context
    if "a2a" not in name:
        parts = [activation_bytes(model, each, 2).block for each in (layout, alone)]
        assert parts[0] == parts[1] / layout.context


def test_heads_that_are_exchanged_are_kept_once():
    """Queries, keys and values of the kernel and both outputs, instead of the product and its
    rotated copies."""
    ring, exchanged = parse_layout("cp2"), parse_layout("cp2-a2a")
    q, k = 8 * 16, 2 * 16
    assert attention_widths(ring, HEADS, changed=True, normalised=False) == 3 * q + 3 * k
    assert attention_widths(exchanged, HEADS, changed=True, normalised=False) == 3 * q + 2 * k
    each = dataclasses.replace(ring, comm=("p2p", "a2a"))
    assert attention_widths(each, HEADS, True, False) == 3 * q + 2.5 * k
    # A head of keys goes to every rank whose queries use it.
    assert [HEADS.sent_keys(ranks) for ranks in (1, 2, 4, 8)] == [2, 2, 4, 8]


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_partitions_over_data_and_context(small, zero):
    model = small("llama")
    divided = Layout(data=2, context=4, zero=zero, precision="bf16")
    assert state_bytes(divided) == state_bytes(dataclasses.replace(divided, data=8, context=1))
    (share,) = rank_shares(model, divided)
    assert rank_memory(model, divided, 1, 1, share).optimizer == 12 / 8 * share.parameters


def test_rings_are_hidden_behind_attention_and_heads_are_not(small):
    model = small("llama", seq_length=2**17, max_position_embeddings=2**17)
    hardware = Hardware(gpus=4)
    times = {}
    for name in ("cp4", "cp4-a2a", "cp4-allgather"):
        layout = parse_layout(f"{name}-bf16-zero1")
        times[name] = step_time(model, layout, 1, 2, rank_shares(model, layout), hardware)
    assert times["cp4"][0].context == 0 < times["cp4"][1].context
    for name in ("cp4-a2a", "cp4-allgather"):
        time, sent = times[name]
        assert time.context == pytest.approx(sent.context / hardware.ring_bandwidth(4, 1))
    lengths = lengths_of_rank(family_of("gpt").block_lengths(model)[0], 4)
    assert (lengths.own, lengths.keys) == (2**15, 2**17)


def llama_8b(length):
    """Llama 3 8B."""
    return ModelFlags(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8,
        ffn_hidden_size=14_336, seq_length=length, swiglu=True, normalization="RMSNorm",
        add_bias_linear=False, untie_embeddings_and_output_weights=True,
        position_embedding_type="rope", attention_dropout=0.0, hidden_dropout=0.0,
    ).resolve()  # fmt: skip


def test_half_a_million_tokens_of_8b_on_one_card():
    """Inputs of 32 blocks, 4 GiB each, and Adam's float32 states and gradients are in host memory;
    without tiles or without the host nothing fits into 80 GB."""
    work = Workload(llama_8b(2**19), 128_256, 1, micro_batch_size=1)
    hardware = Hardware(gpus=1, gpu_memory="80GB", peak_tflops=989.0)
    layout = Layout(
        zero=2, precision="bf16", recompute="uniform", offload_optimizer="cpu", micro_batches=(1,)
    )
    plans = {
        name: estimate(work, layout, 1, hardware, saving)
        for name, saving in {
            "nothing": LongContextConfig(),
            "tiles": LongContextConfig(mlp_chunks_for_training=0),
            "chunks": LongContextConfig(
                mlp_chunks_for_training=0, checkpoint_in_cpu=True, ds_sequence_parallel_fpdt=True,
                ds_sequence_parallel_fpdt_offloading=True,
            ),
        }.items()
    }  # fmt: skip
    memory, usable = plans["chunks"].memory, hardware.usable_memory
    assert memory.total < usable
    assert min(plans["nothing"].memory.total, plans["tiles"].memory.total) > usable
    parameters = 8_030_261_248
    inputs, chunks = 32 * 2**32, 2**19 * 2 * (2 * 4096 + 2 * 1024)
    assert memory.host == pytest.approx(inputs + chunks + (12 + 4 + 2) * parameters, rel=1e-6)
    assert memory.weights == 2 * parameters and memory.optimizer == memory.gradients == 0
    flops = work.flops() / 2**19
    linear = 6 * (parameters - 128_256 * 4096)
    assert flops == pytest.approx(linear + 6 * 32 * 2**19 * 4096, rel=1e-3)


def test_long_sequences_are_divided_and_short_ones_are_not():
    hardware = Hardware(gpus=8)
    for length, expected in ((4096, {1}), (2**15, {1, 2, 4}), (2**17, {1, 2, 4, 8})):
        work = Workload(llama_8b(length), 128_256, 8, micro_batch_size=1)
        actual = {layout.context for layout, _ in layouts(work, hardware)}
        assert actual == expected, length
    assert all(a.processes == 8 for a, _ in layouts(work, hardware))
    kinds = {a.comm for a, _ in layouts(work, hardware) if a.context == 8}
    assert kinds == {(), ("a2a",)}
    short = Workload(llama_8b(4096), 128_256, 8, micro_batch_size=1)
    assert {plan.saving for plan in search(short, Hardware(gpus=1))} == {LongContextConfig()}


def test_the_command_of_a_long_sequence(capsys):
    """Flags that the trainer takes, and the host memory."""
    words = (
        "--gpus 1 --gpu H100 --model llama3-8b --seq-length 524288 --global-batch-size 1 "
        "--mlp-chunks-for-training 0 --checkpoint-in-cpu --ds-sequence-parallel-fpdt "
        "--ds-sequence-parallel-fpdt-offloading"
    )
    assert load_program("tools/plan.py").main(words.split()) == 0
    told = capsys.readouterr().out
    assert "causal attention counts half of the pairs" in told
    assert "GiB of host memory for each GPU" in told and "OFFLOAD.json is" in told
    for flag in ("--mlp-chunks-for-training 0", "--checkpoint-in-cpu", "--zero-stage 2"):
        assert flag in told
    shape = TransformerShape.of(llama_8b(2**19).with_vocabulary(128_256, 1))
    assert f"{shape.flops_per_step(1, causal=True) / 1e15:,.1f} PFLOP" in told
