#!/usr/bin/env bash
# Megatron-DeepSpeed's first step: trains in bf16 and saves the folders of DeepSpeed's engine.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/../universal.sh"

save_run bf16 "$@"
