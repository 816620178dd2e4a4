#!/usr/bin/env bash
# Merges what the maps of a metric have written, for a curriculum; ../analyze.sh has the settings.
#
#     METRIC=total_vocab_freq ds_analyze_gpt_data_reduce.sh [FLAG ...]
source "$(dirname "$0")/../analyze.sh"

analyze GPT reduce "$@"
