#!/usr/bin/env bash
# Continues the pretraining of a Llama 2 with 7 billion weights on text of your own: one node or
# several, ZeRO 3. LLAMA_PATH is its folder, as Hugging Face or Meta has it; the first start reads it,
# each later one its own newest checkpoint. Sizes and tokenizer are the model's.
source "$(dirname "$0")/common.sh"

LLAMA_PATH=${LLAMA_PATH:-Llama-2-7b-hf}
TOKENIZER=${TOKENIZER:-$LLAMA_PATH}
pretrain continue-llama2 --pretrained-checkpoint "$LLAMA_PATH" --use-checkpoint-args \
    --deepspeed_config deepspeed_configs/ds_zero3.json --bf16 \
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 256 --train-iters 5000 \
    --recompute-granularity full --recompute-method uniform \
    --lr 2e-5 --min-lr 2e-6 --lr-decay-style cosine --lr-warmup-iters 100 \
    --weight-decay 0.1 --adam-beta2 0.95 "$@"
