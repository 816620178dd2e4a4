"""BERTs, with their own heads and others, and T5s that train in milliseconds, as flags, for the
tests of every layout."""

from __future__ import annotations

from training_jobs import depth

from megatron.apps.parity.layouts import parse_layout
from megatron.config.layouts import Layout

COMMON = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 2 --lr 1e-2 --weight-decay 0.1 --tokenizer-type NullTokenizer "
    "--vocab-size 99 --make-vocab-size-divisible-by 8 --mock-data --short-seq-prob 0.4 "
    "--num-workers 0 --eval-iters 0 --peak-tflops 1 --log-interval 1000"
).split()
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0".split()
ENCODER_DROPOUT = "--retro-encoder-hidden-dropout {0} --retro-encoder-attention-dropout {0}"
"""Of a Retro, at a rate."""
FAMILIES = {
    "bert": ["--model-family", "bert", "--num-layers", "8", *COMMON],
    "t5": [
        *("--model-family", "t5", "--num-layers", "4", "--decoder-num-layers", "4"),
        *("--decoder-seq-length", "8"),
        *COMMON,
    ],
    "retro": [
        *("--model-family", "retro", "--num-layers", "8", "--retro-gpt-chunk-length", "4"),
        *("--retro-cross-attention-layers", "3", "5", "6"),
        *ENCODER_DROPOUT.format(0).split(),
        *COMMON,
    ],
    "biencoder": ["--model-family", "biencoder", "--num-layers", "8", *COMMON],
    **{
        name: ["--model-family", name, "--num-layers", "8", *COMMON]
        for name in ("classification", "regression", "multiple_choice", "span")
    },
}
"""Flags of each family: as many blocks as the stages of the largest layout."""

POST_NORM = ["--apply-residual-connection-post-layernorm"]
MODERN = (
    "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear"
).split()
RELATIVE = (
    "--position-embedding-type relative --relative-attention-num-buckets 8 "
    "--relative-attention-max-distance 12 --normalization RMSNorm --disable-bias-linear "
    "--query-pre-attn-scalar 1"
).split()
MODERNBERT = (
    "--use-rotary-position-embeddings --normalization UnbiasedLayerNorm --disable-bias-linear "
    "--glu-activation geglu_erf --embed-layernorm --no-first-norm --bert-no-binary-head "
    "--sliding-window 6 --window-attn-skip-freq 3 --rotary-base-local 100"
).split()
BART = (
    "--position-embedding-offset 2 --separate-decoder-embedding --lm-head-bias "
    "--no-bias-gelu-fusion"
).split()
UNTIED = ["--untie-embeddings-and-output-weights"]
FULL = "--recompute-granularity full --recompute-num-layers 3".split()
BLOCK = "--recompute-granularity full --recompute-method block".split()
SELECTIVE = ["--recompute-activations"]
SHARED = ["--biencoder-shared-query-context-model"]
MODELS: dict[str, dict[str, list[str]]] = {
    "bert": {
        "pre-norm": [],
        "post-norm": POST_NORM,
        "lm-only": ["--bert-no-binary-head"],
        "post-norm-lm-only": [*POST_NORM, "--bert-no-binary-head", *SELECTIVE],
        "untied": UNTIED,
        "modern": [*MODERN, "--num-query-groups", "2", "--bert-no-binary-head"],
        "windows-packed": [
            *(*MODERN, "--bert-no-binary-head", "--bert-packing", "--sliding-window", "6"),
            *("--window-attn-skip-freq", "3", "--rotary-base-local", "100"),
        ],
        "recompute-full": FULL,
        "recompute-block": [*BLOCK, *POST_NORM],
        "recompute-selective": SELECTIVE,
        "next-sentence": [*POST_NORM, "--bert-pair-task", "next-sentence", *UNTIED],
        "modernbert": MODERNBERT,
    },
    "t5": {
        "learned": [],
        "learned-untied": UNTIED,
        "relative": [*RELATIVE, "--relu", "--scale-head-input"],
        "relative-untied": [*RELATIVE, *UNTIED, "--glu-activation", "geglu"],
        "uneven": [*RELATIVE, "--num-layers", "3", "--decoder-num-layers", "5"],
        "partition": ["--pipeline-partition", "parameters"],
        "rotary": [*MODERN, "--num-query-groups", "1"],
        "recompute-full": [*FULL, *RELATIVE, "--scale-head-input"],
        "recompute-block": [*BLOCK, *RELATIVE],
        "recompute-selective": [*SELECTIVE, *RELATIVE, *UNTIED],
        "umt5": [*RELATIVE, *UNTIED, "--relative-attention-per-block"],
        "bart": [*BART, *POST_NORM],
        "mbart": [*BART, "--embed-layernorm", "--scale-embeddings"],
    },
    "retro": {
        "learned": [],
        "untied": [*UNTIED, "--retro-attention-gate", "0.5"],
        "modern": [*MODERN, "--num-query-groups", "2"],
        "post-norm": [*POST_NORM, "--retro-cross-attention-layers", "1", "8"],
        "one-neighbor": [
            *("--retro-num-neighbors", "1", "--retro-num-retrieved-chunks", "1"),
            *("--retro-encoder-layers", "1", "--retro-cross-attention-layers", "4"),
        ],
        "partition": ["--pipeline-partition", "parameters"],
        "recompute-full": [*FULL, *MODERN],
        "recompute-block": BLOCK,
        "recompute-selective": [*SELECTIVE, *UNTIED],
    },
    "biencoder": {
        "towers": ["--retriever-report-topk-accuracies", "1"],
        "projected": ["--biencoder-projection-dim", "24"],
        "shared": [*SHARED, *MODERN, "--num-query-groups", "2", "--retriever-score-scaling"],
        "recompute-full": FULL,
        "recompute-block": [*BLOCK, *SHARED],
        "recompute-selective": SELECTIVE,
    },
    "classification": {
        "pre-norm": [],
        "post-norm": POST_NORM,
        "modern": [*MODERN, "--num-query-groups", "2", *UNTIED],
        "recompute-full": FULL,
    },
    "regression": {"lm-only": ["--bert-no-binary-head", *SELECTIVE]},
    "multiple_choice": {"pre-norm": [], "modern": [*MODERN, *UNTIED], "recompute-block": BLOCK},
    "span": {"pre-norm": [], "modern": [*MODERN, *UNTIED], "recompute-full": FULL},
}
"""By family and name, the flags of models that differ in what crosses ranks and stages."""


def blocks(family: str, count: int) -> list[str]:
    """The flags of so many blocks, of T5 half of them in the decoder, of Retro the last of which
    reads neighbours, and the one before."""
    if family == "retro":
        attending = [str(number) for number in range(max(1, count - 1), count + 1)]
        return ["--num-layers", str(count), "--retro-cross-attention-layers", *attending]
    if family == "biencoder":  # each of two encoders has half of them
        return ["--num-layers", str(max(1, count // 2))]
    if family != "t5":
        return ["--num-layers", str(count)]
    return ["--num-layers", str(count - count // 2), "--decoder-num-layers", str(count // 2)]


def split_ranks(layout: Layout) -> list[int]:
    """Every pipeline rank where a decoder can start; none where its start follows from the number
    of blocks alone."""
    return list(range(1, layout.pipeline)) if layout.chunks == 1 else []


def flags(family: str, model: str, layout: str, times: int = 1) -> tuple[int, list[str]]:
    """Processes of a layout, and the flags of a model for it, without those of the layout:
    ``times`` the fewest micro batches that its schedule takes."""
    parsed = parse_layout(layout)
    batch = 2 * parsed.fewest_micro_batches * times * parsed.data
    argv = [*FAMILIES[family], *MODELS[family][model], "--global-batch-size", str(batch)]
    if family not in ("t5", "retro", "biencoder"):  # whose flags say which blocks have what
        argv += depth(layout)
    return parsed.processes, argv
