#!/usr/bin/env bash
# GPT-2 of 124 million weights on 10 billion tokens: one node of 8 GPUs, ZeRO 1.
source "$(dirname "$0")/common.sh"

small=("${SMALL_SIZES[@]}" --seq-length 64 --max-position-embeddings 64)
recipe_of pretrain_gpt2_125m.sh "$@"
