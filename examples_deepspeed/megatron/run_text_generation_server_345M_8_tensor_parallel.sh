#!/usr/bin/env bash
# Megatron-LM's script: the same server as run_text_generation_server_345M.sh, with each layer's
# matrices shared among 8 processes (GPUS).
source "$(dirname "$0")/megatron.sh"

text_generation_server 8 "$@"
