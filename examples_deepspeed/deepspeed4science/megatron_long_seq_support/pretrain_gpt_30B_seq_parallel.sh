#!/usr/bin/env bash
# A GPT of 30 billion weights over 32 tensor-parallel ranks that share the sequence as well
# (--sequence-parallel); N_K thousands of tokens. The JSON profiles the first step.
source "$(dirname "$0")/../../megatron_deepspeed.sh"

defaults MODEL_SIZE=30 MP_SIZE=32
long_gpt3 "$@"
