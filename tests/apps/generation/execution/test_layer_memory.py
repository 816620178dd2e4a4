"""Models whose blocks keep different things of a text: keys and values, latents, states, nothing.
The reference is the same model in one pass without a cache, whose layers are formulas here.

Shapes: B samples, S tokens, N heads, D width of a head, W numbers of a latent, V of its value, X
inputs of a step.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from configs import model_config
from generation_models import play, same
from gpt_forward import forward
from tool_modules import load_program
from torch import nn

from megatron.apps.generation.execution import states
from megatron.apps.generation.execution.runner import PagedRunner, cut, page_shape, state_shape
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.memory import CacheConfig
from megatron.apps.generation.request import (
    Beams,
    GenerationRequest,
    Sampling,
    SequencePart,
    StepInput,
    StopRules,
)
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.apps.planning.parameters import kept_bytes
from megatron.config import ConfigError
from megatron.config.features import ModelPart
from megatron.config.sections import Latents, States
from megatron.families import family_of
from megatron.model import block
from megatron.model.attention_masks import AttentionScoring
from megatron.parallel.mesh import SINGLE
from megatron.parallel.shard import Init, Shard, parameter
from megatron.tokenizer.plain import NullTokenizer

CPU = torch.device("cpu")
WIDTH, HEADS, D, W, V = 32, 4, 8, 12, 10
X = HEADS * (3 * D + 1)
PROMPTS = [[5, 7, 9], [1], [60, 2, 2, 2, 8, 9, 11, 3, 3, 17, 20], [4] * 4, [*range(3, 30)], [3] * 8]
SCORES = AttentionScoring(scale=0.3)
PROOF = pytest.mark.proof


class Matrix(nn.Module):
    """x A^T"""

    def __init__(self, outputs, inputs, tp):
        super().__init__()
        self.weight = parameter(Shard((outputs, inputs)), Init(0.1), tp.coordinates)

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


class LatentMixer(nn.Module):
    """Heads whose one key is a latent vector, of which the first numbers are the value."""

    def __init__(self, layer, tp):
        super().__init__()
        self.layer = layer
        self.q, self.latent = Matrix(HEADS * W, WIDTH, tp), Matrix(W, WIDTH, tp)
        self.proj = Matrix(WIDTH, HEADS * V, tp)

    def forward(self, x_BSH, state):
        q_BSNW, latents_BSW = self.q(x_BSH).unflatten(-1, (HEADS, W)), self.latent(x_BSH)
        if state.cache is not None:
            y = state.cache.attend_latents(self.layer, q_BSNW, latents_BSW, V, SCORES, None)
            return self.proj(y.flatten(2))
        scores_BNSS = torch.einsum("bsnw,btw->bnst", q_BSNW, latents_BSW) * SCORES.scale
        later = torch.ones_like(scores_BNSS[0, 0], dtype=torch.bool).triu(1)
        weights_BNSS = scores_BNSS.masked_fill(later, -torch.inf).softmax(-1)
        y_BSNV = torch.einsum("bnst,btv->bsnv", weights_BNSS, latents_BSW[..., :V])
        return self.proj(y_BSNV.flatten(2))


class StateMixer(nn.Module):
    """S <- decay S + k v^T, y = S^T q, of inputs to which half of the token before is added."""

    def __init__(self, layer, tp):
        super().__init__()
        self.layer = layer
        self.inputs, self.proj = Matrix(X, WIDTH, tp), Matrix(WIDTH, HEADS * D, tp)

    def forward(self, x_BSH, state):
        inputs_BSX = self.inputs(x_BSH)
        if state.cache is not None:
            return self.proj(state.cache.recur(self.layer, inputs_BSX, self.step))
        return self.proj(self.step(inputs_BSX, None)[0])

    def step(self, inputs_BSX, before):
        exact = torch.promote_types(inputs_BSX.dtype, torch.float32)
        if before is None:
            count = len(inputs_BSX)
            before = torch.zeros(count, HEADS, D, D), torch.zeros(count, X)
        s_BNDD, last_BX = (each.to(exact) for each in before)
        ys = []
        for x_BX in inputs_BSX.to(exact).unbind(1):
            mixed_BX, last_BX = x_BX + last_BX / 2, x_BX
            q, k, v, a = mixed_BX.unflatten(-1, (HEADS, -1)).split([D, D, D, 1], -1)
            s_BNDD = s_BNDD * torch.sigmoid(a + 1)[..., None] + k[..., None] * v[..., None, :]
            ys.append((s_BNDD * q[..., None]).sum(-2).flatten(1))
        return torch.stack(ys, 1).to(inputs_BSX.dtype), (s_BNDD, last_BX.contiguous())


@dataclasses.dataclass(frozen=True)
class KindsPart(ModelPart):
    """Kinds of the blocks: k keys and values, l latents, s states, m an MLP alone."""

    kinds: str = ""

    def lacks(self, layer):
        return "attention" if self.kinds[layer] == "m" else None

    def memory(self, layer, model, tensor_size):
        shapes = ((HEADS // tensor_size, D, D), (X // tensor_size,))
        return {"l": Latents(W), "s": States(shapes)}.get(self.kinds[layer])


@pytest.fixture
def made(gpt_config, random_gpt, monkeypatch):
    """Makes a model with blocks of these kinds, and its configuration."""

    def make(kinds, dtype=torch.float32):
        def mixer(config, layer, tp, recompute):
            cls = {"l": LatentMixer, "s": StateMixer}.get(kinds[layer])
            return None if cls is None else cls(layer, tp)

        feature = SimpleNamespace(
            mixer=mixer, mlp=lambda *_: None, attention=lambda attend, *_: attend
        )
        monkeypatch.setattr(block, "taking_part", lambda: (feature,))
        config = gpt_config(
            llama=True, num_layers=len(kinds), num_query_groups=2, max_position_embeddings=48
        )
        model = config.model
        parts = (*model.parts, KindsPart(kinds))
        config = dataclasses.replace(config, model=dataclasses.replace(model, parts=parts))
        return config, random_gpt(config).to(dtype)

    return make


def runner_of(config, model, pages=90, page_size=4, slots=16):
    generation = family_of("gpt").generation(config, None)
    stages = StagedLayers.alone(model, config.model.hidden_size)
    return PagedRunner(stages, config.model, generation, pages, page_size, slots=slots)


@pytest.mark.parametrize(
    "kinds", ["kslm", *(pytest.param(kinds, marks=PROOF) for kinds in ("ll", "ss", "mks"))]
)
def test_against_the_model_in_one_pass(kinds, made):
    """In float64; prompts in pieces, and the same bits alone."""
    config, model = made(kinds, torch.float64)
    runner = runner_of(config, model)
    texts = play(runner, PROMPTS, 9, chunk=6, together=4)
    for text in texts:
        with torch.inference_mode():
            logits = forward(model, torch.tensor([text.prompt + text.tokens[:-1]]))[0, :, :61]
        log_probs = logits.log_softmax(-1)
        after = len(text.prompt) - 1
        torch.testing.assert_close(text.log_probs.double(), log_probs[after:], rtol=0, atol=1e-6)
    assert same(texts, [play(runner, [each], 9, shuffled=False)[0] for each in PROMPTS])


def engine_of(runner, *limits):
    return GenerationEngine(runner, NullTokenizer(60), EngineLimits(*limits))


def requests():
    """Fifteen: draws, searches, prompts that several have, scores of prompts."""
    for number in range(15):
        prompt = PROMPTS[number % 6] if number < 12 else PROMPTS[4]
        yield GenerationRequest(
            tuple(prompt),
            StopRules(4 + number % 5),
            Sampling(seed=number, top_p=0.9) if number % 4 else Sampling(greedy=True),
            Beams(3) if number in (3, 9, 13) else None,
            logprobs=2,
            prompt_logprobs=1 if number == 5 else None,
        )


def test_nothing_depends_on_others(made):
    """To the last bit, alone and together: texts of one prompt, draws, beams, prompts in pieces."""
    runner = runner_of(*made("kslm"), pages=120)
    asked = list(requests())
    alone = [engine_of(runner, 4, 100, 4).complete([each])[0] for each in asked]
    engine = engine_of(runner, 15, 21, 20)
    together = engine.complete(asked[::-1])[::-1]
    assert [dataclasses.replace(each, cached=0) for each in together] == alone
    assert any(each.cached for each in together), "texts of one prompt read it once"
    assert (engine.stats.slots, engine.stats.slots_used, engine.stats.pages_used) == (16, 0, 0)
    assert len({each.tokens for each in alone}) > 10


def test_states_of_forks(made):
    """A search of one beam is the greedy text; the best of more beams has a better score, which is
    that of its tokens in one pass."""
    config, model = made("ssk", torch.float64)
    runner = runner_of(config, model)
    prompt = tuple(PROMPTS[2])

    def search(width):
        asked = GenerationRequest(prompt, StopRules(8), beams=Beams(width), logprobs=0)
        return engine_of(runner, 8, 20, 4).complete([asked])[0]

    greedy = GenerationRequest(prompt, StopRules(8), Sampling(greedy=True))
    (text,) = engine_of(runner, 8, 20, 4).complete([greedy])
    assert search(1).tokens == text.tokens
    for beam in search(5).beams:
        with torch.inference_mode():
            logits = forward(model, torch.tensor([prompt + beam.tokens[:-1]]))[0, :, :61]
        chosen = logits.log_softmax(-1)[len(prompt) - 1 :]
        logprobs = chosen.gather(1, torch.tensor(beam.tokens)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor([score.logprob for score in beam.scores]), logprobs.float()
        )


def test_long_sequences_are_read_again(made, monkeypatch):
    """LongRoPE: a text that becomes long is computed from its first token, states included."""
    runner = runner_of(*made("ks", torch.float64))
    asked = GenerationRequest(tuple(PROMPTS[2]), StopRules(9), Sampling(greedy=True), logprobs=0)
    (expected,) = engine_of(runner, 4, 20, 4).complete([asked])
    runner.long_after = 14
    (again,) = engine_of(runner, 4, 20, 4).complete([asked])
    assert again.tokens == expected.tokens
    for ours, other in zip(again.scores, expected.scores, strict=True):
        assert ours.logprob == pytest.approx(other.logprob, abs=1e-9)


def test_texts_of_a_step_of_states(made, monkeypatch):
    """Four heads have four decays, and vectors more: eight texts are computed together. Where no
    number of texts gives the same bits, each is alone, with the same results."""
    config, model = made("s")
    runner = runner_of(config, model)
    calls = []
    group_of = states.group_of
    monkeypatch.setattr(states, "group_of", lambda *of: calls.append(group_of(*of)) or calls[-1])
    together = play(runner, PROMPTS, 6)
    assert len(calls) == 1 and calls[0] in (1, 2, 4, 8)
    monkeypatch.setattr(states, "group_of", lambda *of: 0)
    assert same(play(runner_of(config, model), PROMPTS, 6), together)


def test_a_step_whose_rows_depend_on_their_number():
    def unsteady(x_BSX, before):
        return x_BSX * (1 + 1e-6 * len(x_BSX)), before

    x, pools = torch.ones(3, 1, 40), (torch.ones(9, 5),)
    assert states.group_of(unsteady, x, pools) == 0
    assert states.group_of(lambda x, before: (x * 2, before), x, pools) == 1


def test_what_was_in_a_slot_before_does_not_matter(made):
    config, model = made("sl")
    runner = runner_of(config, model)
    first = play(runner, PROMPTS, 5)
    for pool in runner.memory.pools:
        pool.fill_(torch.nan)
    for pool in runner.states.of(0):
        pool.fill_(torch.nan)
    assert same(play(runner, PROMPTS, 5), first)


def test_bytes(made):
    """A page has positions x width of a latent, and 2 x heads x positions x width of keys and
    values; a slot heads x D x D + X numbers of 4 bytes, whatever the dtype of the weights."""
    config, model = made("klsmlk", torch.bfloat16)
    stages = StagedLayers.alone(model, WIDTH)
    shape, of_text = page_shape(stages, config.model, 64), state_shape(stages, config.model)
    assert shape.bytes == 64 * 2 * (2 * 2 * 2 * D + 2 * W)
    assert of_text.bytes == 4 * (HEADS * D * D + X)
    runner = runner_of(config, model, pages=7, page_size=64, slots=3)
    pools = sum(pool.untyped_storage().nbytes() for pool in runner.memory.pools)
    assert pools == 7 * shape.bytes
    slots = sum(pool.untyped_storage().nbytes() for pool in runner.states.of(2))
    assert slots == 3 * of_text.bytes
    # Slots take half of the memory at most, and pages the rest.
    cache = CacheConfig(kv_cache_gib=40 * of_text.bytes / 2**30)
    assert cache.slots(of_text, shape, CPU, SINGLE) == 20
    pages = cache.pages(shape, 48, CPU, SINGLE, 20 * of_text.bytes)
    assert pages == 20 * of_text.bytes // shape.bytes
    assert CacheConfig(kv_cache_gib=1.0).slots(of_text, shape, CPU, SINGLE) == 64
    small = CacheConfig(kv_cache_gib=1e-7)
    with pytest.raises(ConfigError, match="1e-07 has no room for the states of one text, 1,424 by"):
        small.slots(of_text, shape, CPU, SINGLE)


def test_more_beams_than_slots(made):
    engine = engine_of(runner_of(*made("s"), slots=2), 4, 20, 4)
    asked = GenerationRequest((1, 2), StopRules(3), beams=Beams(3))
    with pytest.raises(ValueError, match="3 beams need the states of as many texts; .* for 2"):
        engine.submit(asked)
    actual = engine.complete([dataclasses.replace(asked, beams=None)] * 4)
    assert len(actual) == 4


def test_a_prompt_that_is_cut_within_a_piece(made):
    runner = runner_of(*made("s"))
    with pytest.raises(AssertionError, match="cut at 2, not 4"):
        runner.run(StepInput((SequencePart((1, 2), 2, (0,), slot=0),)))


def test_passes_are_cut_at_pieces():
    """In passes of 32 rows at most prompts are cut at multiples of 32 of their own positions."""
    parts = (
        SequencePart((1,), 70, (0, 1), decoding=True, slot=0),
        SequencePart(tuple(range(80)), 64, (2, 3, 4), slot=1),
        SequencePart((1,) * 20, 0, (5,), slot=2),
    )
    passes = cut(parts, 32, 64, 32)
    actual = [[(part.slot, part.start, len(part.tokens)) for part in each] for each in passes]
    assert actual == [[(0, 70, 1)], [(1, 64, 32)], [(1, 96, 32)], [(1, 128, 16)], [(2, 0, 20)]]


@PROOF
def test_where_products_depend_on_their_rows(made, monkeypatch):
    """Then passes have one number of rows, and texts are the same bits alone and together."""
    linear = torch.nn.functional.linear

    def unsteady(x, weight, bias=None):
        return linear(x, weight, bias) * (1 + 1e-7 * x.shape[:-1].numel())

    config, model = made("ksl")
    monkeypatch.setattr(torch.nn.functional, "linear", unsteady)
    runner = runner_of(config, model, page_size=64, pages=12)
    assert runner.piece == 32
    prompts = [[n % 61 for n in range(7, 47)], *PROMPTS[:3]]
    together = play(runner, prompts, 5)
    assert same(together, [play(runner, [each], 5)[0] for each in prompts])


@pytest.mark.parametrize(
    ("published", "flags"),
    [
        (
            70_272,
            dict(
                num_layers=61, hidden_size=7168, num_attention_heads=128, qk_head_dim=128,
                multi_latent_attention=True, kv_lora_rank=512, qk_pos_emb_head_dim=64,
                v_head_dim=128,
            ),
        ),
        (516_096, dict(num_layers=126, hidden_size=16384, num_attention_heads=128, kv_channels=128,
                       num_query_groups=8)),
        (327_680, dict(num_layers=80, hidden_size=8192, num_attention_heads=64, kv_channels=128,
                       num_query_groups=8)),
    ],
    ids=["deepseek_v3", "llama3_405b", "qwen2_72b"],
)  # fmt: skip
def test_published_bytes_of_a_token(published, flags):
    """In bf16, table 1 of "Insights into DeepSeek-V3" (arXiv:2505.09343)."""
    assert kept_bytes(model_config(seq_length=8, **flags), 2) == (published, 0)


def test_bytes_in_a_plan(made):
    """The line of tools/plan.py: of a model with keys and values alone it has none."""
    generation = load_program("tools/plan.py").generation
    config, _ = made("klsm")
    bytes_of_token = 2 * (2 * 2 * D + W)
    assert generation(config.model, "bf16") == [
        f"generation on one rank keeps {bytes_of_token} bytes of each token and 1,424 of each text "
        "(--kv-cache-gib)"
    ]
    assert generation(made("kk")[0].model, "bf16") == []
