#!/usr/bin/env bash
# OneFlow GPT's script: 4 nodes of 8 processes, data 2 x tensor 4 x pipeline 4, global batch 512,
# hidden size 2304, 24 layers. The same line on each node, which finds its rank by its address:
#
#     ONEFLOW_GPT_NODE_IPS=10.11.0.2,10.11.0.3,10.11.0.4,10.11.0.5 DATA_PATH=... \
#         examples_deepspeed/distribute_pretrain_4n8d_2x4x4_512_2304x24.sh
source "$(dirname "$0")/common.sh"

NODES=${NODES:-4}
oneflow_gpt gpt-2304x24 8 --num-layers 24 --hidden-size 2304 --num-attention-heads 24 \
    --seq-length 2048 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 \
    --micro-batch-size 8 --global-batch-size 512 "$@"
