#!/usr/bin/env bash
# The same on the GPUs of one node (8) or several (NNODES, NODE_RANK, MASTER_ADDR).
source "$(dirname "$0")/common.sh"

pretrain_bert 8 bert_345m "${wikipedia[@]}" "${wordpiece[@]}" "$@"
