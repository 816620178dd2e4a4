#!/usr/bin/env bash
# Megatron-LM's script: the dialogues of TEST_FILE with the knowledge of KNOWLEDGE_FILE, to
# PROCESSED_FILE, the input of prompt_resp_gen.sh.
source "$(dirname "$0")/msdp.sh"

preprocess --func prepare_input --test_file "${TEST_FILE:-$wow/testseen_processed.txt}" \
    --knwl_gen_file "${KNOWLEDGE_FILE:-$wow/output_testseen_knowledge_generations.txt}" \
    --processed_file \
    "${PROCESSED_FILE:-$wow/testseen_processed_with_generated_knowledge.txt}" "$@"
