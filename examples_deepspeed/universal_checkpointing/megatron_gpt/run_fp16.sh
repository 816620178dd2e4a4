#!/usr/bin/env bash
# Megatron-DeepSpeed's first step: trains in fp16 and saves the folders of DeepSpeed's engine.
source "$(dirname "$(realpath "$0")")/../universal.sh"

save_run fp16 "$@"
