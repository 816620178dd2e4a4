#!/usr/bin/env bash
# A Llama of 1.1 billion weights on 21 billion tokens: one node of 8 GPUs, ZeRO 2.
source "$(dirname "$0")/common.sh"

small=("${SMALL_SIZES[@]}" --seq-length 64 --max-position-embeddings 64
    --ffn-hidden-size 176 --num-query-groups 2)
recipe_of pretrain_llama_1b.sh "$@"
