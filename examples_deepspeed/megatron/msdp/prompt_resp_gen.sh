#!/usr/bin/env bash
# Megatron-LM's script: the answer to each dialogue of INPUT_PATH, by a GPT that is shown the 20
# examples of PROMPT_PATH, to OUTPUT_PATH.
source "$(dirname "$0")/msdp.sh"

: "${INPUT_PATH:=$wow/testseen_processed_with_generated_knowledge.txt}"
prompt response 20 output_response_prompts.txt output_testseen_response_generations.txt "$@"
