#!/usr/bin/env bash
# Megatron-LM's script: Wizard of Wikipedia (WOW_DATA_FOLDER) and Wizard of the Internet
# (WOI_DATA_FOLDER) as lines of dialogues, and the examples that are shown to the model. You have to
# supply both data sets, and MODEL_FILE, a question encoder of DPR.
source "$(dirname "$0")/msdp.sh"

preprocess --func process_wow_dataset --raw_file "$wow/train.json" \
    --processed_file "$wow/train_processed.txt" "$@"
for test in seen:random unseen:topic; do
    name=test${test%:*}
    preprocess --func process_wow_dataset --raw_file "$wow/test_${test#*:}_split.json" \
        --processed_file "$wow/${name}_processed.txt" \
        --knwl_ref_file "$wow/output_${name}_knowledge_reference.txt" \
        --resp_ref_file "$wow/output_${name}_response_reference.txt" "$@"
done
preprocess --func process_woi_dataset --raw_file "$woi/test.jsonl" \
    --processed_file "$woi/test_processed.txt" \
    --knwl_ref_file "$woi/output_test_knowledge_reference.txt" \
    --resp_ref_file "$woi/output_test_response_reference.txt" "$@"

prompts() { # FOLDER NAME TYPE FLAG ...
    preprocess --func get_knwl_gen_prompts --test_file "$1/$2_processed.txt" \
        --train_file "$wow/train_processed.txt" --model_file "${MODEL_FILE:-checkpoints/dpr}" \
        --processed_file "$1/output_$2_knowledge_prompts.json" --data_type "$3" "${@:4}"
}
prompts "$wow" testseen wow_seen "$@"
prompts "$wow" testunseen wow_unseen "$@"
prompts "$woi" test woi "$@"
preprocess --func get_resp_gen_prompts --train_file "$wow/train_processed.txt" \
    --processed_file "$wow/output_response_prompts.txt" "$@"
