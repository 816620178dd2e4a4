#!/usr/bin/env bash
# The same on the GPUs of one node (8) or several (NNODES, NODE_RANK, MASTER_ADDR).
source "$(dirname "$0")/common.sh"

pretrain_gpt2 8 gpt2_345m "$@"
