#!/usr/bin/env bash
# Megatron-DeepSpeed's third step: resumes in fp16 from the universal checkpoint of run_fp16.sh.
source "$(dirname "$(realpath "$0")")/../universal.sh"

resume_run fp16 "$@"
