"""The command line of this trainer for a setting of the contestants."""

from __future__ import annotations

import torch

from contestants.setting import (
    BETAS,
    CLIP,
    EPS,
    LEARNING_RATE,
    OF_TODAY,
    SEED,
    WEIGHT_DECAY,
    Setting,
)

NEVER = 10**9
FEW = 10**4
"""Iterations of data whose order is drawn in advance."""
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"
UNTIED = "--untie-embeddings-and-output-weights"
QWEN2 = f"{LLAMA} --add-qkv-bias --rotary-base 1000000 --norm-epsilon 1e-6"
EXPERTS = {
    "mixtral": f"{LLAMA} {UNTIED} --rotary-base 1000000",
    "qwen3_moe": f"{LLAMA} {UNTIED} --qk-layernorm --rotary-base 1000000 --norm-epsilon 1e-6",
}
"""Without balancing losses, as transformers trains them unless it is told otherwise."""

LAYERS = {
    "youtu": f"{LLAMA} {UNTIED} --norm-epsilon 1e-6 --multi-latent-attention "
    "--q-lora-rank {half} --kv-lora-rank {quarter} --qk-head-dim {width} "
    "--qk-pos-emb-head-dim {half_width} --v-head-dim {width} --qk-layernorm "
    "--latent-norm-epsilon 1e-6",
    "qwen3_5_text": f"{LLAMA} {UNTIED} --norm-epsilon 1e-6 --kv-channels {{width}} "
    "--rotary-percent 0.25 --attention-output-gate --qk-layernorm --apply-layernorm-1p "
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
    "--linear-num-key-heads {heads} --linear-num-value-heads {heads} --linear-key-head-dim {width} "
    "--linear-value-head-dim {width}",
    "bamba": f"{LLAMA} {UNTIED} --rotary-percent 0.5 --experimental-attention-variant mamba2 "
    "--linear-attention-freq 4 --mamba-state-dim 64 --mamba-head-dim 64 --mamba-num-groups 1",
}
"""Models of one layer of today each, without experts, by sizes of the setting."""

BERT = "--apply-residual-connection-post-layernorm --no-bias-gelu-fusion"
T5 = (
    "--position-embedding-type relative --normalization RMSNorm --norm-epsilon 1e-6 --relu "
    "--disable-bias-linear --query-pre-attn-scalar 1 --scale-head-input"
)
RETRO = "--retro-add-retriever --retro-encoder-hidden-dropout 0 --retro-encoder-attention-dropout 0"


def flags_of(setting: Setting, stage: int, extra: tuple[str, ...] = ()) -> list[str]:
    """The command line of the setting."""
    # Without worker processes on a CPU the loader's time is in the process that is measured.
    workers = "--num-workers 0" if not torch.cuda.is_available() else ""
    flags = (
        f"--num-layers {setting.layers} --hidden-size {setting.hidden_size} "
        f"--ffn-hidden-size {setting.ffn_hidden_size} --num-attention-heads {setting.heads} "
        f"--num-query-groups {setting.kv_heads} --seq-length {setting.seq_length} "
        f"--micro-batch-size {setting.micro_batch} "
        f"--global-batch-size {setting.micro_batch * setting.micro_batches} "
        f"--attention-dropout 0 --hidden-dropout 0 --seed {SEED} "
        f"--lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} "
        f"--adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS} --clip-grad {CLIP} "
        f"{_tokens(setting)} --train-iters {NEVER} --log-interval {NEVER} --eval-iters 0 "
        f"--peak-tflops 1 --zero-stage {stage} {workers} {_architecture(setting)} "
        f"{'--bf16' if setting.dtype == 'bf16' else ''}"
    )
    return [*flags.split(), *_task(setting), *extra]


def _tokens(setting: Setting) -> str:
    if setting.task == "dpo":
        return ""
    return f"--tokenizer-type NullTokenizer --vocab-size {setting.vocab_size - 1} --mock-data"


def _task(setting: Setting) -> list[str]:
    """The flags of a fine-tuning, which replace those before them."""
    if setting.task == "pretrain":
        return []
    flags = ["--pretrained-checkpoint", str(setting.weights)]
    if setting.task == "lora":
        return [*flags, "--lora", "--lora-rank", str(setting.lora_rank)]
    return [
        *(*flags, "--preference", "dpo", "--data-path", str(setting.pairs), "--split", "100,0,0"),
        *("--tokenizer-type", "HFTokenizer", "--tokenizer-model", str(setting.weights)),
        *("--train-iters", str(FEW)),
    ]


def _architecture(setting: Setting) -> str:
    if setting.architecture == "gpt2":
        return ""
    if setting.architecture == "bert":
        return BERT
    if setting.architecture == "retro":
        return RETRO
    if setting.architecture == "t5":
        return f"{T5} --decoder-seq-length {setting.decoder_length}"
    if setting.experts:
        return (
            f"{EXPERTS[setting.architecture]} --kv-channels {setting.kv_channels} --num-experts "
            f"{setting.experts} --moe-router-topk {setting.choices} --moe-ffn-hidden-size "
            f"{setting.ffn_hidden_size}"
        )
    if setting.architecture in OF_TODAY:
        width, hidden = setting.kv_channels, setting.hidden_size
        return LAYERS[setting.architecture].format(
            heads=setting.heads, width=width, half_width=width // 2, half=hidden // 2,
            quarter=hidden // 4,
        )  # fmt: skip
    untied = "" if setting.tied else UNTIED
    return f"{QWEN2 if setting.architecture == 'qwen2' else LLAMA} {untied}"
