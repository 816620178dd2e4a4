#!/usr/bin/env bash
# Megatron-DeepSpeed's third step: resumes in bf16 from the universal checkpoint of run_bf16.sh.
source "$(dirname "$(realpath "$0")")/../universal.sh"

resume_run bf16 "$@"
