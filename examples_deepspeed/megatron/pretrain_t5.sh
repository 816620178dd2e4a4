#!/usr/bin/env bash
# Megatron-LM's script of 2023: T5 with 220 million weights, one process.
source "$(dirname "$(realpath "$0")")/megatron.sh"

megatron_lm_t5 1 --micro-batch-size 16 --global-batch-size 16 "$@"
