"""Small models of transformers that generate, and steps that continue texts on a runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.apps.generation.request import Runner, SequencePart, StepInput, TargetScores

VOCAB, POSITIONS = 61, 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
    "attention_dropout": 0.0, "tie_word_embeddings": False,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4,
             "n_positions": POSITIONS},
    "llama": _SIZES,
    "gptj": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4,
             "n_positions": POSITIONS, "rotary_dim": 4},
    "gpt_neo": {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 4, "num_heads": 4,
                "max_position_embeddings": POSITIONS, "window_size": 7,
                "attention_types": [[["global", "local"], 2]]},
    "xglm": {"vocab_size": VOCAB, "d_model": 32, "ffn_dim": 48, "num_layers": 4,
             "attention_heads": 4, "max_position_embeddings": POSITIONS},
    "mistral": _SIZES | {"sliding_window": 7},
    "gemma2": _SIZES
    | {"head_dim": 8, "query_pre_attn_scalar": 12, "sliding_window": 7, "tie_word_embeddings": True}
    | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    "gemma4_text": _SIZES
    | {"head_dim": 8, "global_head_dim": 12, "num_global_key_value_heads": 1,
       "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 7,
       "final_logit_softcapping": 1.5,
       "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "qwen3": _SIZES | {"head_dim": 12, "tie_word_embeddings": True},
    "bamba": _SIZES | {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8,
                       "mamba_n_groups": 2},
    # Steps of single tokens have no least value in transformers, other than those of prompts.
    "nemotron_h": {key: value for key, value in _SIZES.items() if key != "num_hidden_layers"}
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention",
                             "mlp"], "head_dim": 12, "time_step_min": 1e-9}
    | {"ssm_state_size": 8, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2}
    | {"n_routed_experts": 16, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
       "moe_shared_expert_intermediate_size": 32},
    "youtu": _SIZES | {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8, "v_head_dim": 12,
    },
    "llama4_text": _SIZES | {
        "num_local_experts": 4, "intermediate_size": 20, "intermediate_size_mlp": 48,
        "head_dim": 12, "attention_chunk_size": 7, "no_rope_layers": [1, 0, 1],
        "moe_layers": [1], "floor_scale": 5, "attn_scale": 0.5,
    },
    "t5": {
        "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2,
        "num_decoder_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20, "pad_token_id": 0, "decoder_start_token_id": 0,
    },
    "deepseek_v3": _SIZES | {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "moe_intermediate_size": 32, "n_group": 2,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.5, "mscale": 0.8,
            "mscale_all_dim": 0.7, "original_max_position_embeddings": 16,
        },
    },
    "qwen3_next": _SIZES | {
        "num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 4, "num_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "linear_num_key_heads": 2,
        "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "decoder_sparse_step": 1,
    },
}  # fmt: skip
"""Settings of transformers' own configurations, by model type."""
PROMPTS = [[5, 7, 9], [1], [60, 2, 2, 2, 8, 9, 11, 3, 3, 17, 20], [4, 4, 4], [*range(3, 27)], [3]]


def their_model(shape: str, seed: int = 3) -> Any:
    """A model of transformers whose weights are random, norms and biases included."""
    import transformers

    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = transformers.AutoConfig.for_model(shape, **tokens | SHAPES[shape])
    if SHAPES[shape].get("attn_logit_softcapping"):
        config._attn_implementation = "eager"
    auto = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        auto = transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            values = torch.randn(param.shape, generator=generator) * 0.15
            param.copy_(values + 1.0 if bool((param == 1).all()) else values)
    return model.eval()


def tolerance(shape: str) -> float:
    """Return that of log-probabilities in float32. In qwen3_next transformers inverts a matrix of
    each chunk in float32, row by row; those of gemma4_text have no scale."""
    return {"qwen3_next": 1e-4, "gemma4_text": 2e-5}.get(shape, 5e-6)


@torch.inference_mode()
def their_greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], Tensor]:
    """The new tokens, and the log-probabilities [``count``, V] of each step."""
    made = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    log_probs = torch.stack([step[0].float() for step in made.logits]).log_softmax(-1)
    return made.sequences[0, -count:].tolist(), log_probs


@dataclass
class Played:
    """What a runner has computed for one text: new tokens, their logits [new, V], and the scores of
    the prompt's tokens after the first, [prompt - 1]."""

    prompt: list[int]
    pages: list[int]
    number: int | None = None
    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    scores: list[TargetScores] = field(default_factory=list)
    fed: int = 0

    @property
    def log_probs(self) -> Tensor:
        return torch.stack(self.logits).log_softmax(-1)

    @property
    def prompt_log_probs(self) -> Tensor:
        return torch.cat([each.logprobs for each in self.scores])


def play(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    count: int,
    chunk: int = 1000,
    together: int = 1000,
    top: int = 2,
    shuffled: bool = True,
) -> list[Played]:
    """The greedy continuation of each prompt by ``count`` tokens. Prompts are fed ``chunk`` tokens
    at a time, in whole pieces, and at most ``together`` texts are under way: others begin while
    they are decoded. Pages are given out in a mixed order, unless they are not ``shuffled``."""
    size, encodes = runner.page_size, runner.max_prompt is not None
    free = list(range(runner.pages))
    if shuffled:
        free = free[::2] + free[1::2][::-1]
    chunk = max(chunk - chunk % runner.piece, runner.piece)
    slots = list(range(runner.slots or 0))
    texts = []
    for number, prompt in enumerate(prompts):
        decoded = [runner.start_token] if encodes else list(prompt)
        pages = [free.pop() for _ in range(-(-(len(decoded) + count) // size))]
        texts.append(Played(decoded, pages, number if encodes else None))
    waiting, running = list(texts), []
    while waiting or running:
        begun = waiting[: together - len(running)]
        waiting, running = waiting[len(begun) :], running + begun
        for each in begun:
            each.slot = slots.pop(0) if slots else None
        parts = tuple(_part(text, chunk, size, top) for text in running)
        encode = tuple((each.number, tuple(prompts[each.number])) for each in begun if encodes)
        result = runner.run(StepInput(parts, encode=encode))
        _take(running, parts, result)
        ended = [text for text in running if len(text.tokens) == count]
        slots += [each.slot for each in ended if each.slot is not None]
        running = [text for text in running if len(text.tokens) < count]
        if encodes and ended:
            runner.run(StepInput((), forget=tuple(each.number for each in ended)))
    return texts


def _part(text: Played, chunk: int, size: int, top: int) -> SequencePart:
    start, prompt = text.fed, text.prompt
    decoding = start >= len(prompt)
    tokens = [text.tokens[-1]] if decoding else prompt[start : start + chunk]
    end = start + len(tokens)
    targets = () if decoding else tuple(prompt[start + 1 : end + 1])
    pages = tuple(text.pages[: -(-end // size)])
    text.fed = end
    return SequencePart(
        tuple(tokens), start, pages, decoding, end >= len(prompt), targets, top, text.number,
        slot=text.slot,
    )  # fmt: skip


def _take(running: Sequence[Played], parts: Sequence[SequencePart], result: Any) -> None:
    rows, scores = iter(result.logits_RV), iter(result.scores)
    for text, part in zip(running, parts, strict=True):
        if part.targets:
            text.scores.append(next(scores))
        if part.logits:
            row = next(rows)
            text.logits.append(row)
            text.tokens.append(int(row.argmax()))


def same(found: Sequence[Played], expected: Sequence[Played]) -> bool:
    """Whether all numbers are the same bit by bit."""
    return all(
        ours.tokens == other.tokens
        and all(map(torch.equal, ours.logits, other.logits))
        and (not ours.scores or torch.equal(ours.prompt_log_probs, other.prompt_log_probs))
        for ours, other in zip(found, expected, strict=True)
    )


def save_theirs(folder: Path, shape: str) -> Path:
    """The model as a folder of Hugging Face."""
    their_model(shape).save_pretrained(folder)
    return folder
