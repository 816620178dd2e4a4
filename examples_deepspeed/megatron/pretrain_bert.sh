#!/usr/bin/env bash
# Megatron-LM's script of 2023: BERT with 345 million weights, one process.
source "$(dirname "$(realpath "$0")")/megatron.sh"

megatron_lm_bert 1 --train-iters 2000000 --micro-batch-size 4 --global-batch-size 8 "$@"
