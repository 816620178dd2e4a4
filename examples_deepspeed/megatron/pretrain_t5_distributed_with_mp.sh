#!/usr/bin/env bash
# Megatron-LM's script of 2023: T5 with 220 million weights, 8 processes: 2 tensor-parallel ranks,
# data parallel over 4.
source "$(dirname "$(realpath "$0")")/megatron.sh"

megatron_lm_t5 8 --tensor-model-parallel-size 2 --micro-batch-size 16 --global-batch-size 128 "$@"
