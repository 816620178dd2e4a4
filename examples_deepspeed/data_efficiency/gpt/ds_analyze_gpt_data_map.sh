#!/usr/bin/env bash
# Measures a metric of the samples of a GPT, in one of NUM_WORKERS processes; ../analyze.sh has the settings.
#
#     METRIC=total_vocab_freq ds_analyze_gpt_data_map.sh [WORKER_ID] [FLAG ...]
source "$(dirname "$0")/../analyze.sh"

analyze GPT map "$@"
