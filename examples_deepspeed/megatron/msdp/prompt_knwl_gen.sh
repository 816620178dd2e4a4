#!/usr/bin/env bash
# Megatron-LM's script: knowledge for each dialogue of INPUT_PATH, by a GPT that is shown the 10
# examples of PROMPT_PATH, to OUTPUT_PATH.
source "$(dirname "$0")/msdp.sh"

prompt knowledge 10 output_testseen_knowledge_prompts.json output_testseen_knowledge_generations.txt "$@"
