#!/usr/bin/env bash
# OneFlow GPT's script: 1 node of 8 processes, data 2 x tensor 4 x pipeline 1, global batch 16,
# hidden size 1536, 16 layers.
source "$(dirname "$0")/common.sh"

oneflow_gpt gpt-1536x16 8 --num-layers 16 --hidden-size 1536 --num-attention-heads 16 \
    --seq-length 2048 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 \
    --micro-batch-size 8 --global-batch-size 16 "$@"
