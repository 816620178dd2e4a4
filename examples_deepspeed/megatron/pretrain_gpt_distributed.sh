#!/usr/bin/env bash
# Megatron-LM's script of 2023: GPT with 345 million weights, data parallel over 8 processes.
source "$(dirname "$(realpath "$0")")/megatron.sh"

megatron_lm_gpt 8 --micro-batch-size 8 --global-batch-size 64 "$@"
