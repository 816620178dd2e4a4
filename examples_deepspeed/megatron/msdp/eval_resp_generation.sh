#!/usr/bin/env bash
# Megatron-LM's script: F1 of the generated answers, MODEL_GEN_PATH, against
# GROUND_TRUTH_RESPONSE_PATH, and against the knowledge, GROUND_TRUTH_KNOWLEDGE_PATH. BLEU, METEOR and
# ROUGE-L are the business of nlg-eval, a program of others.
source "$(dirname "$0")/msdp.sh"

: "${MODEL_GEN_PATH:=$wow/output_testseen_response_generations.txt}"
f1 "${GROUND_TRUTH_RESPONSE_PATH:-$wow/output_testseen_response_reference.txt}" "$@"
f1 "${GROUND_TRUTH_KNOWLEDGE_PATH:-$wow/output_testseen_knowledge_reference.txt}" "$@"
