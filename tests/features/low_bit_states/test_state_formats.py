"""Stored optimizer states: what is exact, what rounds, and that rounding is unbiased."""

import math

import pytest
import torch

from megatron.config.layouts import StateDtypes
from megatron.features.low_bit_states.stored_states import (
    BLOCK,
    BFloat16,
    Blockwise,
    Float32Moments,
    Remainder,
    Rounded,
    key_of,
    more_bits,
    random_bits,
    state_formats,
    to_bfloat16,
    wrapped,
)
from megatron.parallel.shard import Cut, Shard

COUNT = 1 << 18
MOMENTS = {
    "fp32": Float32Moments(),
    "bf16": BFloat16(),
    "signed int8": Blockwise(signed=True),
    "unsigned int8": Blockwise(signed=False),
}


def bits_of(count: int, step: int = 1, key: int = 5) -> torch.Tensor:
    elements = torch.arange(key, key + count, dtype=torch.int32)
    return random_bits(elements, torch.tensor(step, dtype=torch.int32))


def blocks(values: torch.Tensor) -> torch.Tensor:
    """Values as blocks, or as a last block alone."""
    return values.view(-1, min(BLOCK, values.numel()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a.view(-1) == b.view(-1)).all())


def patterns() -> torch.Tensor:
    """Float32 numbers of every upper half, each with the lower halves at which rounding changes."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x1234, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xABCD, 0xFFFF])
    return (upper[:, None] + lower).to(torch.int32).view(-1).view(torch.float32)


def test_remainders_are_exact():
    form, values = Remainder(), patterns()
    weight, stored = form.encode(values)
    back = form.decode(weight, stored)
    nan = values.isnan()
    assert bool((back.view(torch.int32) == values.view(torch.int32))[~nan].all())
    assert bool(weight[nan].isnan().all()) and bool(back[nan].isnan().all())
    nearest = values.to(torch.bfloat16)
    halfway = values.view(torch.int32) & 0xFFFF == 0x8000
    assert same_bits(weight[~nan & ~halfway], nearest[~nan & ~halfway])
    again = form.encode(back)
    assert same_bits(again[0][~nan], weight[~nan]) and same_bits(again[1][0], stored[0])


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("count", [1, 255, 256, 5120])
def test_what_is_stored_stays(name, count):
    """A checkpoint has the decoded values; loading it must give the same bits."""
    form = MOMENTS[name]
    torch.manual_seed(count)
    values = torch.randn(count) * 10 ** torch.empty(count).uniform_(-9, 0)
    if name.startswith("unsigned"):
        values = values.square()
    values[::7] = 0
    values = blocks(values)
    codes, *scales = form.zeros(count, torch.device("cpu"))
    zeros = blocks(codes), *scales
    assert bool((form.decode(zeros) == 0).all())
    for random in (None, blocks(bits_of(count))):
        stored = form.encode(values, random)
        assert [(t.shape, t.dtype) for t in stored] == [(t.shape, t.dtype) for t in zeros]
        decoded = form.decode(stored)
        assert bool((decoded[values == 0] == 0).all())
        for a, b in zip(form.encode(decoded), stored, strict=True):
            assert same_bits(a, b)
    numbers = sum(t.numel() * t.element_size() for t in stored)
    assert numbers == math.ceil(count * form.bytes) or count % BLOCK


@pytest.mark.parametrize("name", ["signed int8", "unsigned int8"])
def test_8_bits_keep_three_of_the_mantissa_over_the_range(name):
    form = MOMENTS[name]
    smallest = 2.0**-15 if name.startswith("signed") else 2.0**-31
    ratios = torch.logspace(math.log2(smallest), 0, 10 * BLOCK, base=2.0, dtype=torch.float64)
    scale = 3.7e-5
    values = (ratios.view(BLOCK, 10).t().reshape(-1) * scale).float()
    values = blocks(values)
    values[:, -1] = scale
    if name.startswith("signed"):
        values[:, ::2] *= -1
    found = form.decode(form.encode(values))
    assert ((found - values).abs() / values.abs()).max() <= 1 / 16 + 1e-6
    assert bool((found.abs().amax(1) == scale).all())


def test_second_moments_do_not_become_0():
    values = torch.full((1, BLOCK), 1e-30)
    values[0, 0] = 1e-2
    form = Blockwise(signed=False)
    found = form.decode(form.encode(values, blocks(bits_of(BLOCK))))
    assert bool((found > 0).all())


def test_blocks_of_nothing_become_0():
    """No code means a subnormal number, which some devices treat as 0."""
    for form in (Blockwise(signed=True), Blockwise(signed=False)):
        codes, scales = form.encode(torch.full((1, BLOCK), 1e-38))
        assert not codes.any() and not scales.any()


def rounded(form, values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    if isinstance(form, Rounded):
        return form.decode(*form.encode(values, random))
    return form.decode(form.encode(values, random))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "name, fraction",
    [("Rounded", 0.3), ("bf16", 0.01), ("signed int8", 0.3), ("unsigned int8", 0.01)],
)
def test_stochastic_rounding_is_unbiased(name, fraction, sign):
    """The mean over many updates of one number is the number, to five standard deviations."""
    if sign < 0 and name == "unsigned int8":
        return
    form = Rounded() if name == "Rounded" else MOMENTS[name]
    gap = 2**-7 if name in ("Rounded", "bf16") else 2**-3
    value = sign * (1 + fraction * gap) / 4
    values = torch.full((COUNT // BLOCK, BLOCK), value)
    values[:, 0] = sign * 2.0  # the scale of 8 bits
    for step, random in ((7, lambda bits: bits), (8, more_bits)):
        found = rounded(form, values, random(blocks(bits_of(COUNT, step))))
        found = found[values == value].double()
        low, high = sorted((sign / 4, sign * (1 + gap) / 4))
        assert set(found.unique().tolist()) == {low, high}
        spread = gap / 4 * math.sqrt(fraction * (1 - fraction) / found.numel())
        assert abs(found.mean().item() - value) < 5 * spread
    nearest = rounded(form, values, None)
    assert bool((nearest[values == value] == sign / 4).all())


def test_rounded_to_nearest_second_moments_never_fall():
    """Why moments are rounded stochastically: 0.999 of a number is nearer to it than to the next
    number of 16 bits below, so 2,000 steps without gradients change nothing."""
    form = BFloat16()
    nearest = random = torch.full((4096,), 1.0)
    for step in range(2000):
        nearest = form.decode(form.encode(nearest * 0.999))
        random = form.decode(form.encode(random * 0.999, bits_of(4096, step)))
    assert bool((nearest == 1.0).all())
    assert random.mean().item() == pytest.approx(0.999**2000, rel=0.01)


def test_rounding_keeps_infinities_and_nan():
    special = torch.tensor([math.inf, -math.inf, math.nan])
    # As CUDA writes it.
    special[2:] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    for random in (None, torch.full((3,), -1, dtype=torch.int32)):
        found = to_bfloat16(special, random)
        assert found[0] == math.inf and found[1] == -math.inf and found[2].isnan()


def test_bytes():
    for dtypes, expected in (
        (StateDtypes(), 10),
        (StateDtypes("fp32", "bf16", "bf16"), 6),
        (StateDtypes("bf16", "bf16", "bf16"), 4),
        (StateDtypes("fp32", "int8", "int8"), 4 + 2 * 4 / BLOCK),
    ):
        assert state_formats(dtypes).bytes == expected


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Bits as numbers of mean 0 and variance 1."""
    return ((bits.long() & 0xFFFFFFFF).double() / 2**32 - 0.5) * math.sqrt(12)


def test_bits_are_random():
    """Mean, distribution, and correlation of elements, updates, parameters and draws."""
    first = bits_of(COUNT, 1)
    others = {
        "next update": bits_of(COUNT, 2),
        "later update": bits_of(COUNT, 100_001),
        "other parameter": bits_of(COUNT, 1, key=1 << 30),
        "other draw": more_bits(first),
    }
    bound = 5 / math.sqrt(COUNT)
    for bits in (first, *others.values()):
        values = uniform(bits)
        assert abs(values.mean()) < bound
        for distance in (1, 2, 16, 256, 1024):
            assert abs((values[distance:] * values[:-distance]).mean()) < bound, distance
        for part in (bits >> 20, bits >> 4, bits):  # of 12 bits
            counts = torch.bincount(part & 0xFFF, minlength=4096).double()
            excess = ((counts - COUNT / 4096) ** 2 / (COUNT / 4096)).sum() - 4095
            assert abs(excess) < 5 * math.sqrt(2 * 4095)
    for name, bits in others.items():
        assert abs((uniform(bits) * uniform(first)).mean()) < bound, name
    steps = torch.stack([uniform(bits_of(8, step)) for step in range(4096)])
    assert (steps[1:] * steps[:-1]).mean(0).abs().max() < 5 / 64


def test_bits_do_not_depend_on_the_slice():
    whole = bits_of(1000)
    assert same_bits(whole[300:700], bits_of(400, key=305))


def test_keys():
    """Copies of a parameter have the same, parts of it others."""
    cut = Shard((8, 4), (Cut(0),))
    ranks = [{"tensor": (rank, 2), "pipeline": (0, 2)} for rank in range(2)]
    keys = {key_of(1, "a", cut, rank) for rank in ranks}
    keys |= {key_of(1, "b", cut, ranks[0]), key_of(2, "a", cut, ranks[0])}
    assert len(keys) == 4
    elsewhere = ranks[1] | {"pipeline": (1, 2), "data": (1, 2)}
    assert key_of(1, "a", cut, ranks[1]) == key_of(1, "a", cut, elsewhere)
    copied = Shard((8, 4))
    assert key_of(1, "a", copied, ranks[0]) == key_of(1, "a", copied, ranks[1])
    assert all(-(2**31) <= key < 2**31 for key in keys)
    assert wrapped(2**31) == -(2**31) and wrapped(-1) == -1
