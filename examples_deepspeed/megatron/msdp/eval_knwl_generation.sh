#!/usr/bin/env bash
# Megatron-LM's script: F1 of the generated knowledge, MODEL_GEN_PATH, against GROUND_TRUTH_PATH.
# BLEU, METEOR and ROUGE-L are the business of nlg-eval, a program of others.
source "$(dirname "$0")/msdp.sh"

: "${MODEL_GEN_PATH:=$wow/output_testseen_knowledge_generations.txt}"
f1 "${GROUND_TRUTH_PATH:-$wow/output_testseen_knowledge_reference.txt}" "$@"
