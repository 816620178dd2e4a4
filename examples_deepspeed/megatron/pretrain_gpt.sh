#!/usr/bin/env bash
# Megatron-LM's script of 2023: GPT with 345 million weights, one process.
source "$(dirname "$(realpath "$0")")/megatron.sh"

megatron_lm_gpt 1 --micro-batch-size 4 --global-batch-size 8 "$@"
