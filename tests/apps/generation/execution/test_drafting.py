"""Drafts of blocks of multi-token prediction are those of the training pass, in float64, and texts
with them have the bits of those without.

Shapes: T tokens, H hidden.
"""

import dataclasses
import random

import pytest
import torch

from megatron.apps.generation.execution.runner import PagedRunner, page_shape
from megatron.apps.generation.execution.stages import StagedLayers
from megatron.apps.generation.memory import CacheConfig, ServedConfig
from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.config import ConfigError
from megatron.families import family_of
from megatron.model.attention_masks import AttentionMasks
from megatron.model.layer_list import LayerState
from megatron.parallel.loss_head import Targets
from megatron.tokenizer.plain import NullTokenizer

VOCAB, LONGEST = 6, 56
LLAMA = {"llama": True, "num_query_groups": 2}
KINDS = {
    "one": LLAMA | {"mtp_num_layers": 1},
    "learned": {"mtp_num_layers": 1, "position_embedding_type": "learned_absolute"},
    "two": LLAMA | {"mtp_num_layers": 2},
    "repeated": LLAMA | {"mtp_num_layers": 2, "mtp_use_repeated_layer": True},
    "latent": {
        "llama": True,
        "mtp_num_layers": 1,
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
    },
    "experts": LLAMA | {"mtp_num_layers": 1, "num_experts": (4,), "moe_router_topk": 2},
    "temperature": LLAMA
    | {
        "mtp_num_layers": 1,
        "attention_temperature": 0.5,
        "attention_temperature_floor": 3,
        "attention_temperature_rotary": True,
    },
    "window": LLAMA | {"mtp_num_layers": 1, "sliding_window": 5, "softmax_type": "learnable"},
}
PROOF = pytest.mark.proof


class Recorder:
    """Remembers the steps of a runner with one text, and the states of which its drafts are."""

    def __init__(self, runner):
        self.steps, self.states = [], []
        self._run, self._best = runner.run, runner._head.best
        runner.run, runner._head.best = self.run, self.best

    def run(self, step):
        self.steps.append((step, self._run(step)))
        return self.steps[-1][1]

    def best(self, x_1BH):
        self.states.append(x_1BH[0, 0].clone())
        return self._best(x_1BH)

    def drafts(self):
        """The part, the drafts and their states of each that asked for them."""
        states = iter(self.states)
        for step, result in self.steps:
            for part in step.parts:
                if part.drafts:
                    (drafts,) = result.drafts
                    yield part, drafts, torch.stack([next(states) for _ in drafts])


def config_of(gpt_config, kind):
    lengths = {"seq_length": LONGEST, "max_position_embeddings": LONGEST}
    return gpt_config(VOCAB, **KINDS[kind], **lengths)


def engine_of(config, model, drafts, step_tokens=7, running=4):
    stages = StagedLayers.alone(model, config.model.hidden_size)
    generation = family_of("gpt").generation(config, None)
    runner = PagedRunner(stages, config.model, generation, 60, 8, drafts=drafts)
    limits = EngineLimits(running, running * (1 + drafts) + step_tokens, 20, drafts)
    return GenerationEngine(runner, NullTokenizer(VOCAB - 1), limits)


class Definition:
    """Drafts by passes over whole sequences, without memory."""

    def __init__(self, model, hidden_size):
        self.stages = StagedLayers.alone(model, hidden_size)
        self.parts, self.head = self.stages.ahead, self.stages.layers - 1

    def block(self, depth, x_TH, tokens):
        tokens_1T = torch.tensor([tokens])
        places_1T = torch.arange(len(tokens))[None] + 1 + depth
        state = LayerState(
            x_TH[None],
            ahead=(LayerState(tokens_1T, position_ids=places_1T),) * (depth + 1),
            masks=AttentionMasks(None),
            targets=Targets(tokens_1T, torch.ones(tokens_1T.shape)),
        )
        return self.stages.last_part(self.parts[depth])(state).total[0]

    def drafts(self, tokens, count):
        """The drafts after some tokens, and the states of which they are, [count, H]."""
        states = []
        with torch.inference_mode():
            state = LayerState(torch.tensor([tokens]))
            y_TH = self.stages.last_part(range(self.head))(state).total[0, :-1]
            drafts, last, x_TH = [], len(self.parts) - 1, y_TH
            for number in range(count):
                depth = min(number, last)
                x_TH = y_TH if number <= last else torch.cat((x_TH, y_TH[-1:]))
                y_TH = self.block(depth, x_TH, [*tokens, *drafts][1 + depth :])
                logits = self.stages.last_part(range(self.head, self.head + 1))(
                    LayerState(y_TH[None, -1:])
                ).hidden
                drafts.append(int(logits[0, 0, :VOCAB].argmax()))
                states.append(y_TH[-1])
        return tuple(drafts), torch.stack(states)


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("two", 2),
        *(pytest.param(kind, n, marks=PROOF) for kind in KINDS for n in (1, 2, 5)),
    ],
)
def test_drafts_are_those_of_the_training_pass(kind, most, gpt_config, random_gpt):
    """Prompts of any length in pieces, after drafts that were right and wrong, over borders of
    pages, and after pages that another text has computed."""
    config = config_of(gpt_config, kind)
    model = random_gpt(config).double()
    definition = Definition(model, config.model.hidden_size)
    common = (3, 1, 4, 1, 5, 0, 2, 0, 5, 3, 5, 1, 2, 2, 4, 0, 1, 2, 3, 0, 1)
    compared = 0
    for prompts in [[(2,)], [common[:3]], [common, common[:16] + (3, 3, 1)]]:
        engine = engine_of(config, model, most, running=1, step_tokens=6 - most)
        recorder = Recorder(engine.runner)
        for number, prompt in enumerate(prompts):
            recorder.steps.clear()
            recorder.states.clear()
            asked = GenerationRequest(prompt, StopRules(30), Sampling(seed=5, temperature=0.7))
            (text,) = engine.complete([asked])
            assert (text.cached > 0) == bool(number)
            whole = prompt + text.tokens
            for part, drafts, states in recorder.drafts():
                expected, of_them = definition.drafts(whole[: part.start + 1], part.drafts)
                assert drafts == expected
                torch.testing.assert_close(states, of_them, rtol=0, atol=1e-10)
                compared += 1
    assert compared > 50


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [("one", range(1)), *(pytest.param(k, range(1, 15), marks=PROOF) for k in KINDS)],
)
def test_texts_have_the_bits_of_those_without(kind, seeds, gpt_config, random_gpt):
    """In float32, tokens and log-probabilities, alone without drafts and together with them."""
    config = config_of(gpt_config, kind)
    model = random_gpt(config)
    accepted = wrong = 0
    for seed in seeds:
        draw = random.Random(seed)
        start = [draw.randrange(VOCAB) for _ in range(9)]
        asked = [
            GenerationRequest(
                (*start[: draw.randrange(10)], draw.randrange(VOCAB)),
                StopRules(draw.randrange(1, 30)),
                draw.choice([Sampling(greedy=True), Sampling(seed=seed, top_p=0.9)]),
                logprobs=3,
                prompt_logprobs=draw.choice([None, None, 1]),
            )
            for _ in range(8)
        ]
        plain = engine_of(config, model, 0)
        alone = [plain.complete([each])[0] for each in asked]
        engine = engine_of(config, model, draw.choice([1, 2, 3]))
        for one, other in zip(alone, engine.complete(asked), strict=True):
            assert dataclasses.replace(one, cached=0) == dataclasses.replace(other, cached=0)
        accepted += engine.stats.accepted_tokens
        wrong += engine.stats.draft_tokens - engine.stats.accepted_tokens
    assert accepted > 2 * len(seeds) and wrong > 2 * len(seeds)


def test_texts_of_one_prompt_have_its_drafts(gpt_config, random_gpt):
    """The pages of a prompt that two texts have are copied with what drafts are made of."""
    config = config_of(gpt_config, "one")
    engine = engine_of(config, random_gpt(config), 2)
    states, head = [], engine.runner._head
    best, head.best = head.best, lambda x_1BH: states.append(x_1BH[0]) or best(x_1BH)
    asked = GenerationRequest((3, 1, 4, 1, 5), StopRules(9), Sampling(greedy=True))
    one, other = engine.complete([asked] * 2)
    assert one.tokens == other.tokens and other.cached == 5
    assert len(states) > 2
    for x_BH in states:
        torch.testing.assert_close(x_BH[0], x_BH[1], rtol=0, atol=1e-5)


def test_memory_of_drafts(gpt_config, random_gpt):
    """Keys and values of the blocks ahead, and the inputs of each at N + 1 places of a page;
    nothing without drafts."""
    config = config_of(gpt_config, "two")
    stages = StagedLayers.alone(random_gpt(config), 32)
    blocks = 2 * 2 * 8 * 4  # keys and values x heads x width x bytes of a number
    assert page_shape(stages, config.model, 16).bytes == 2 * 16 * blocks
    actual = page_shape(stages, config.model, 16, drafts=3).bytes
    assert actual == 4 * 16 * blocks + 2 * (3 + 1) * 32 * 4


def test_flags(gpt_config):
    plain, ahead = gpt_config().model, config_of(gpt_config, "one").model
    assert CacheConfig().drafts(ahead) == ServedConfig().drafts(ahead) == 0
    assert ServedConfig(num_speculative_tokens=3).drafts(ahead) == 3
    assert ServedConfig(num_speculative_tokens=3).drafts(plain) == 0
    assert ServedConfig(num_speculative_tokens=3, speculative_method="ngram").drafts(ahead) == 0
    with pytest.raises(ConfigError, match="--speculative-method mtp: the model has no blocks"):
        ServedConfig(num_speculative_tokens=3, speculative_method="mtp").drafts(plain)
    with pytest.raises(ConfigError, match="mtp needs --num-speculative-tokens"):
        ServedConfig(speculative_method="mtp").drafts(ahead)
