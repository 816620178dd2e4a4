#!/usr/bin/env bash
# Megatron-LM's script: 20 tokens after each prompt of a file, by a checkpoint. The seed is that in
# SEED, or any.
#
#     generate-1.3b.sh PROMPTS CHECKPOINT [FLAG ...]
here=$(dirname "$0")/$(dirname "$(readlink "$0" || echo .)") # the script may be a link to this one
source "$here/../megatron.sh"

(($# >= 2)) || fail "give PROMPTS CHECKPOINT, such as augmented_prompts.jsonl checkpoints"
: "${SEED:=$RANDOM}"
generate_samples --load "$2" --micro-batch-size 400 --out-seq-length 20 --temperature 1.0 \
    --sample-input-file "$1" --sample-output-file "$1_output_$(basename "$2")_seed_$SEED.jsonl" \
    --max-tokens-to-oom 1200000 --top_p 0.9 --seed "$SEED" "${@:3}"
