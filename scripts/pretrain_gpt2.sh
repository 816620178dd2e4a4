#!/usr/bin/env bash
# GPT-2 with 345 million weights on one GPU.
source "$(dirname "$0")/common.sh"

LAUNCHER=${LAUNCHER:-python} pretrain_gpt2 1 gpt2_345m "$@"
