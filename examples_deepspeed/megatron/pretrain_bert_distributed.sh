#!/usr/bin/env bash
# Megatron-LM's script of 2023: BERT with 345 million weights, data parallel over 8 processes.
source "$(dirname "$(realpath "$0")")/megatron.sh"

megatron_lm_bert 8 --train-iters 1000000 --micro-batch-size 4 --global-batch-size 32 "$@"
