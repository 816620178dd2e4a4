#!/usr/bin/env bash
# Megatron-DeepSpeed's third step: resumes in bf16 from the universal checkpoint of run_bf16.sh.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/../universal.sh"

resume_run bf16 "$@"
