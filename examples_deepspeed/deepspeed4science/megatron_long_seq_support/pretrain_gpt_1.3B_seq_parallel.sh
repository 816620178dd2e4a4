#!/usr/bin/env bash
# A GPT of 1.3 billion weights over 8 tensor-parallel ranks that share the sequence as well
# (--sequence-parallel); N_K thousands of tokens. The JSON profiles the first step.
source "$(dirname "$0")/../../megatron_deepspeed.sh"

defaults MODEL_SIZE=1.3 MP_SIZE=8
long_gpt3 "$@"
