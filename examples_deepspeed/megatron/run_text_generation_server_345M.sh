#!/usr/bin/env bash
# Megatron-LM's script: serves GPT of 345 million weights at http://localhost:5000, from one process.
# CHECKPOINT, or CHECKPOINT_PATH, is the folder of the checkpoint. GPUS=8 shares each layer's matrices
# among 8 processes.
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/megatron.sh"

text_generation_server 1 "$@"
