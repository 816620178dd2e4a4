#!/usr/bin/env bash
# Megatron-DeepSpeed's first step, of a Llama: trains in bf16 and saves the folders of DeepSpeed's
# engine.
FAMILY=llama
source "$(dirname "$0")/../universal.sh"

save_run bf16 "$@"
