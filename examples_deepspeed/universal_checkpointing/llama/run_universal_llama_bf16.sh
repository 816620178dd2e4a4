#!/usr/bin/env bash
# Megatron-DeepSpeed's third step, of a Llama: resumes in bf16 from the universal checkpoint of
# run_llama_bf16.sh.
FAMILY=llama
source "$(dirname "$0")/../universal.sh"

resume_run bf16 "$@"
