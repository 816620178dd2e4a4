"""Published models with layouts that are usual for them, as flags.

Sizes: GPT-3 (Brown et al. 2020, arXiv:2005.14165, table 2.1), Llama 3.1 405B (arXiv:2407.21783,
table 3), Qwen3-235B-A22B (its config.json), BERT-large (arXiv:1810.04805), T5-11B
(arXiv:1910.10683, section 3.7), DeepSeek-V3 (arXiv:2412.19437, section 4.2).
"""

COMMON = "--lr 1e-4 --train-iters 100 --mock-data --tokenizer-type NullTokenizer --bf16".split()
LLAMA = (
    "--use-rotary-position-embeddings --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0"
).split()
MODELS = {
    "gpt3-175b": (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --vocab-size 50257"
    ).split(),
    "llama3-405b": [
        *LLAMA,
        *(
            "--num-layers 126 --hidden-size 16384 --num-attention-heads 128 "
            "--num-query-groups 8 --ffn-hidden-size 53248 --seq-length 8192 "
            "--max-position-embeddings 8192 --vocab-size 128256 --rotary-base 500000"
        ).split(),
    ],
    "qwen3-235b": [
        *LLAMA,
        *(
            "--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --num-query-groups 4 "
            "--kv-channels 128 --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536 "
            "--num-experts 128 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss "
            "--moe-aux-loss-coeff 0.001 --qk-layernorm --seq-length 4096 "
            "--max-position-embeddings 40960 --vocab-size 151936 --rotary-base 1000000"
        ).split(),
    ],
    "bert-large": (
        "--model-family bert --num-layers 24 --hidden-size 1024 --num-attention-heads 16 "
        "--seq-length 512 --max-position-embeddings 512 --vocab-size 30522"
    ).split(),
    "t5-11b": (
        "--model-family t5 --num-layers 24 --decoder-num-layers 24 --hidden-size 1024 "
        "--num-attention-heads 128 --kv-channels 128 --ffn-hidden-size 65536 --seq-length 512 "
        "--decoder-seq-length 512 --max-position-embeddings 512 --vocab-size 32100 "
        "--position-embedding-type relative --normalization RMSNorm --disable-bias-linear --relu"
    ).split(),
    "deepseek-v3": [
        *LLAMA,
        *(
            "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --multi-latent-attention "
            "--q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
            "--v-head-dim 128 --qk-layernorm --ffn-hidden-size 18432 --moe-ffn-hidden-size 2048 "
            "--num-experts 256 --moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 "
            "--moe-router-num-groups 8 --moe-router-group-topk 4 "
            "--moe-router-score-function sigmoid --moe-router-enable-expert-bias "
            "--moe-layer-freq ([0]*3+[1]*58) --seq-length 4096 --max-position-embeddings 4096 "
            "--vocab-size 129280"
        ).split(),
    ],
}
"""Flags of the models without a layout."""

LAYOUTS = {
    "gpt3-175b": [
        (1024, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
         "--sequence-parallel --zero-stage 1 --global-batch-size 1536"),
        (1536, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
         "--num-virtual-stages-per-pipeline-rank 3 --pipeline-schedule interleaved "
         "--sequence-parallel --zero-stage 1 --global-batch-size 1536"),
        (512, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 16 "
         "--pipeline-schedule zbh1 --zero-stage 1 --global-batch-size 512"),
        (512, "--tensor-model-parallel-size 8 --zero-stage 3 --global-batch-size 512"),
    ],
    "llama3-405b": [
        (1024, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
         "--sequence-parallel --zero-stage 1 --global-batch-size 512"),
        (1024, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 "
         "--context-parallel-size 4 --sequence-parallel --zero-stage 1 --global-batch-size 256 "
         "--seq-length 131072 --max-position-embeddings 131072"),
        (1152, "--tensor-model-parallel-size 16 --pipeline-model-parallel-size 9 "
         "--sequence-parallel --zero-stage 1 --global-batch-size 512"),
    ],
    "qwen3-235b": [
        (256, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 "
         "--expert-model-parallel-size 8 --sequence-parallel --zero-stage 1 "
         "--global-batch-size 256"),
        (512, "--tensor-model-parallel-size 2 --expert-model-parallel-size 32 "
         "--expert-tensor-parallel-size 1 --sequence-parallel --zero-stage 2 "
         "--global-batch-size 512"),
        (128, "--tensor-model-parallel-size 4 --context-parallel-size 2 "
         "--expert-model-parallel-size 8 --sequence-parallel --zero-stage 1 "
         "--global-batch-size 128"),
    ],
    "bert-large": [
        (64, "--zero-stage 1 --global-batch-size 256"),
        (64, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
         "--sequence-parallel --zero-stage 1 --global-batch-size 256"),
        (32, "--tensor-model-parallel-size 2 --context-parallel-size 2 --zero-stage 2 "
         "--global-batch-size 256"),
    ],
    "t5-11b": [
        (64, "--tensor-model-parallel-size 8 --zero-stage 1 --global-batch-size 256"),
        (64, "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
         "--sequence-parallel --zero-stage 1 --global-batch-size 256"),
    ],
    "deepseek-v3": [
        (2048, "--pipeline-model-parallel-size 16 --expert-model-parallel-size 64 "
         "--zero-stage 1 --global-batch-size 2048"),
        (1024, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 8 "
         "--expert-model-parallel-size 32 --expert-tensor-parallel-size 1 --sequence-parallel "
         "--zero-stage 1 --global-batch-size 2048"),
    ],
}  # fmt: skip
"""(processes, flags) of layouts of each model."""


def cases():
    """(name, processes, words) of every model in each of its layouts."""
    for model, layouts in LAYOUTS.items():
        for number, (ranks, layout) in enumerate(layouts):
            words = [*MODELS[model], *COMMON, *layout.split(), "--micro-batch-size", "1"]
            yield f"{model}-{number}", ranks, words
