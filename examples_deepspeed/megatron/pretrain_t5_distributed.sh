#!/usr/bin/env bash
# Megatron-LM's script of 2023: T5 with 220 million weights, data parallel over 8 processes.
source "$(dirname "$(realpath "$0")")/megatron.sh"

megatron_lm_t5 8 --micro-batch-size 16 --global-batch-size 128 "$@"
