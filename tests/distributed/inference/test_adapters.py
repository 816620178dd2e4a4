"""Several adapters on one model: each text is that of peft with its adapter, whatever else is in a
batch, in every layout."""

import pytest
import torch
from generation_models import PROMPTS, save_theirs, their_greedy, their_model
from samples import sampled

from megatron.apps.generation.memory import ServedConfig
from megatron.apps.generation.opening import opened_runner
from megatron.apps.generation.request import GenerationRequest, Sampling, StopRules
from megatron.apps.generation.scheduling.engine import GenerationEngine
from megatron.apps.generation.scheduling.schedule import EngineLimits
from megatron.config import ConfigError
from megatron.run.run import RunToolParser

peft = pytest.importorskip("peft", reason="the texts are compared with peft's")

COUNT = 8
LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp4": (4, ["--tensor-model-parallel-size", "4"]),
    "tp2-pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()),
}
ADAPTERS = {
    "llama": {
        "plain": {"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]},
        "wide": {"target_modules": ["k_proj", "gate_proj", "up_proj"], "use_rslora": True, "r": 5},
        "dora": {"target_modules": ["q_proj", "o_proj", "up_proj"], "use_dora": True},
    },
    "gpt2": {
        "plain": {"target_modules": ["c_attn", "mlp.c_proj"], "fan_in_fan_out": True},
        "dora": {"target_modules": ["c_attn", "c_proj"], "use_dora": True, "fan_in_fan_out": True},
    },
    "gemma2": {"plain": {"target_modules": ["q_proj", "down_proj"]}},
    "youtu": {
        "plain": {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj"]},
        "wide": {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa"], "use_rslora": True, "r": 5},
        "dora": {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa"], "use_dora": True},
    },
}
CASES = [(shape, layout) for shape in ADAPTERS for layout in LAYOUTS]
SAMPLE = {("gpt2", "one")}
WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat".split()


def adapted(shape, name):
    """Their model with an adapter of random values."""
    settings = {"r": 3, "lora_alpha": 9} | ADAPTERS[shape][name]
    model = peft.get_peft_model(their_model(shape), peft.LoraConfig(**settings)).eval()
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "lora_" in key:
                values = torch.randn(param.shape, generator=generator) * 0.3
                param.copy_(values.abs() + 1.0 if "magnitude" in key else values)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saves a shape and its adapters, once."""
    saved = {}

    def save(shape):
        if shape not in saved:
            place = tmp_path_factory.mktemp(shape)
            save_theirs(place / "base", shape)
            (place / "base" / "vocab.txt").write_text("\n".join(WORDS))
            for name in ADAPTERS[shape]:
                adapted(shape, name).save_pretrained(place / name)
            saved[shape] = place
        return saved[shape]

    return save


def asked(names):
    """Every prompt without and with every adapter, mixed."""
    found = []
    for number, prompt in enumerate(PROMPTS):
        rotated = [*names[number % len(names) :], *names[: number % len(names)]]
        found += [(tuple(prompt), name) for name in rotated]
    return found


def generated(folder, names, layout, processes, alone):
    """For the pool: what the main rank got for all requests, together or each alone."""
    argv = ["--load", str(folder / "base"), "--kv-cache-gib", "0.002", *layout, "--adapter"]
    argv += [f"{name}={folder / name}" for name in names if name]
    argv += ["--tokenizer-type", "BertWordPieceLowerCase"]
    argv += ["--vocab-file", str(folder / "base" / "vocab.txt")]
    config, settings = RunToolParser(ServedConfig, None).parse(argv)
    with opened_runner(settings, processes, config, config.adapter) as opened:
        if opened is None:
            return None
        assert opened.runner.adapters == tuple(name for name in names if name)
        limits = EngineLimits(running=7, step_tokens=16)
        engine = GenerationEngine(opened.runner, opened.tokenizer, limits)
        requests = [
            GenerationRequest(
                prompt, StopRules(COUNT), Sampling(greedy=True), logprobs=3, adapter=name
            )
            for prompt, name in asked(names)
        ]
        groups = [[request] for request in requests] if alone else [requests]
        return [result for group in groups for result in engine.complete(group)]


@pytest.mark.parametrize(("shape", "layout"), sampled(CASES, lambda case: case in SAMPLE))
def test_each_text_is_that_of_its_adapter(pool, folders, shape, layout):
    folder, names = folders(shape), [None, *ADAPTERS[shape]]
    processes, flags = LAYOUTS[layout]
    found, *_ = pool.run(processes, generated, folder, names, flags, processes, False)
    theirs = {name: adapted(shape, name) if name else their_model(shape) for name in names}
    texts = {}
    for (prompt, name), ours in zip(asked(names), found, strict=True):
        tokens, log_probs = their_greedy(theirs[name], prompt, COUNT)
        assert list(ours.tokens) == tokens, (prompt, name)
        chosen = torch.tensor([score.logprob for score in ours.scores])
        expected = log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, expected, rtol=0, atol=2e-5)
        texts.setdefault(prompt, set()).add(tuple(ours.tokens))
    assert all(len(of_prompt) > 1 for of_prompt in texts.values())
    if layout == "tp4":
        return  # gloo adds the addends of four ranks in an order that depends on the number of rows
    alone, *_ = pool.run(processes, generated, folder, names, flags, processes, True)
    for one, other in zip(found, alone, strict=True):
        assert (one.tokens, one.scores) == (other.tokens, other.scores)


@pytest.mark.proof
def test_equal_prompts_of_other_adapters_share_no_pages(pool, folders, monkeypatch):
    """Longer than a page, together with the model's own."""
    folder, names = folders("llama"), [None, "plain", "dora"]
    (found,) = pool.run(1, shared_prompt, folder, names)
    theirs = tuple(range(1, 31))  # their generate ignores token 0
    for name, ours in zip(names * 2, found, strict=True):
        model = adapted("llama", name) if name else their_model("llama")
        assert list(ours.tokens) == their_greedy(model, theirs, COUNT)[0]


def shared_prompt(folder, names):
    """For the pool: twice each adapter on one prompt, the second time from what is cached."""
    from megatron.apps.generation import opening
    from megatron.apps.generation.execution import runner

    argv = ["--load", str(folder / "base"), "--kv-cache-gib", "0.002", "--adapter"]
    argv += [f"{name}={folder / name}" for name in names if name]
    argv += ["--tokenizer-type", "BertWordPieceLowerCase"]
    argv += ["--vocab-file", str(folder / "base" / "vocab.txt")]
    config, settings = RunToolParser(ServedConfig, None).parse(argv)
    with pytest.MonkeyPatch.context() as patch:
        for module in (opening, runner):
            patch.setattr(module, "page_size_of", lambda generation: 8)
        with opened_runner(settings, 1, config, config.adapter) as opened:
            assert opened.runner.page_size == 8
            engine = GenerationEngine(opened.runner, opened.tokenizer)
            requests = [
                GenerationRequest(
                    tuple(range(1, 31)), StopRules(COUNT), Sampling(greedy=True), adapter=name
                )
                for name in names
            ]
            first = engine.complete(requests)
            second = engine.complete(requests)
            assert all(result.cached >= 24 for result in second)
            return first + second


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("x={base}", "neither a folder of peft"),
        ("x=/nowhere", "neither a folder of peft"),
        ("={plain}", "expected NAME=FOLDER"),
    ],
)
def test_refused(pool, folders, flag, words):
    folder = folders("llama")
    name, _, place = flag.format(base=folder / "base", plain=folder / "plain").partition("=")
    argv = ["--load", str(folder / "base"), "--kv-cache-gib", "0.002", "--adapter"]
    argv += [f"{name}={place}", "--tokenizer-type", "BertWordPieceLowerCase"]
    argv += ["--vocab-file", str(folder / "base" / "vocab.txt")]
    config, settings = RunToolParser(ServedConfig, None).parse(argv)
    with (
        pytest.raises(ConfigError, match=words),
        opened_runner(settings, 1, config, config.adapter),
    ):
        pass
