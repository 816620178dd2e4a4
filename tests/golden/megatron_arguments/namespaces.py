"""Arguments that Megatron's programs save with a checkpoint, and settings of GPT-NeoX: name and
value of each, with the values that they have when only the sizes of a small network are given."""

import ast

_MEGATRON_LM = """
accumulate_allreduce_grads_in_fp32 False; adam_beta1 0.9; adam_beta2 0.999; adam_eps 1e-08
add_bias_linear True; add_position_embedding True; add_qkv_bias False; adlr_autoresume False
adlr_autoresume_interval 1000; align_grad_reduce True; align_param_gather True
app_tag_run_name None; app_tag_run_version '0.0.0'; apply_layernorm_1p False
apply_query_key_layer_scaling False; apply_residual_connection_post_layernorm False
apply_rope_fusion True; async_save None; async_tensor_model_parallel_allreduce True
attention_dropout 0.1; attention_softmax_in_fp32 False; auto_detect_ckpt_format False
barrier_with_L1_time True; bert_binary_head True; bert_embedder_type 'megatron'; bert_load None
bf16 True; bias_dropout_fusion True; bias_gelu_fusion False; bias_swiglu_fusion True
biencoder_projection_dim 0; biencoder_shared_query_context_model False; block_data_path None
cache_mla_latents False; calc_ft_timeouts False; calculate_per_token_loss False
check_for_large_grads False; check_for_nan_in_loss_and_grad True; check_for_spiky_loss False
check_weight_hash_across_dp_replicas_interval None; ckpt_assume_constant_structure False
ckpt_convert_format None; ckpt_convert_save None; ckpt_format 'torch'
ckpt_fully_parallel_load False; ckpt_fully_parallel_save True; ckpt_step None
classes_fraction 1.0; clip_grad 1.0; clone_scatter_output_in_embedding True
config_logger_dir ''; consumed_train_samples 800; consumed_valid_samples 100
context_parallel_size 1; cp_comm_type ['p2p']; create_attention_mask_in_dataloader True
cross_entropy_fusion_impl 'native'; cross_entropy_loss_fusion False; cuda_graph_impl 'none'
cuda_graph_scope 'full'; cuda_graph_warmup_steps 3; data_args_path None; data_cache_path None
data_parallel_random_init False; data_parallel_sharding_strategy 'no_shard'
data_parallel_size 1; data_path ['corpus']; data_per_class_fraction 1.0; data_sharding True
dataloader_type 'single'; ddp_average_in_collective False; ddp_bucket_size None
ddp_num_buckets None; ddp_pad_buckets_for_high_nccl_busbw False
ddp_reduce_scatter_with_fp32_accumulation False; decode_only_cuda_graphs False
decoder_first_pipeline_num_layers None; decoder_last_pipeline_num_layers None
decoder_num_layers None; decoder_seq_length None; decoupled_lr None; decoupled_min_lr None
decrease_batch_size_if_needed False; defer_embedding_wgrad_compute False
delay_wgrad_compute False; deprecated_use_mcore_models True; deterministic_mode False
dino_bottleneck_size 256; dino_freeze_last_layer 1; dino_head_hidden_size 2048
dino_local_crops_number 10; dino_local_img_size 96; dino_norm_last_layer False
dino_teacher_temp 0.07; dino_warmup_teacher_temp 0.04; dino_warmup_teacher_temp_epochs 30
disable_bf16_reduced_precision_matmul False; disable_chunked_prefill False
disable_mamba_mem_eff_path False; disable_straggler_on_startup False
disable_symmetric_registration False; dist_ckpt_format_deprecated None
dist_ckpt_optim_fully_reshardable False; dist_ckpt_save_pre_mcore_014 False
dist_ckpt_strictness 'assume_ok_unexpected'; distribute_saved_activations False
distributed_backend 'nccl'; distributed_timeout_minutes 10
distributed_timeout_seconds_after_init None; dump_param_to_param_group_map None
embedding_init_method_std None; embedding_path None; empty_unused_memory_level 0
enable_cuda_graph False; enable_experimental False; enable_ft_package False
enable_full_sharding_in_hsdp False; enable_gloo_process_groups True; enable_msc True
enable_one_logger True; encoder_num_layers 2; encoder_seq_length 12; end_weight_decay 0.01
eod_mask_loss False; error_injection_rate 0; error_injection_type 'transient_error'
eval_interval 1000; eval_iters 100; evidence_data_path None; exit_duration_in_mins None
exit_interval None; exit_on_missing_checkpoint False; exit_signal_handler False
exp_avg_dtype 'fp32'; exp_avg_sq_dtype 'fp32'; expert_model_parallel_size 1
expert_tensor_parallel_size 1; external_cuda_graph False; ffn_hidden_size 64; finetune False
first_last_layers_bf16 False; flash_decode False; fp16 False; fp16_lm_cross_entropy False
fp32_residual_connection False; fp4 None; fp4_param False; fp4_recipe 'nvfp4'; fp8 None
fp8_amax_compute_algo 'most_recent'; fp8_amax_history_len 1; fp8_interval 1; fp8_margin 0
fp8_param_gather False; fp8_quantizer_factory None; fp8_recipe 'delayed'; fp8_wgrad True
fsdp_double_buffer False; full_validation False; global_batch_size 8; glu_linear_offset 0.0
grad_reduce_in_bf16 False; gradient_accumulation_fusion True; gradient_reduce_div_fusion True
group_query_attention False; grpo_clamp_eps_lower 0.01; grpo_default_temperature 1.0
grpo_group_size 2; grpo_iterations 2; grpo_kl_beta 0.001; grpo_prompts_per_step 32
head_lr_mult 1.0; heterogeneous_layers_config_encoded_json None
heterogeneous_layers_config_path None; hidden_dropout 0.1; hidden_size 16
hierarchical_context_parallel_sizes None; high_priority_stream_groups []
hybrid_attention_ratio 0.0; hybrid_mlp_ratio 0.0; hybrid_override_pattern None; hysteresis 2
ict_head_size None; ict_load None; img_h 224; img_w 224; indexer_batch_size 128
indexer_log_interval 1000; inference_batch_times_seqlen_threshold -1
inference_dynamic_batching False; inference_dynamic_batching_block_size 256
inference_dynamic_batching_buffer_size_gb 40.0; inference_max_requests 8
inference_max_seq_length 2560; inference_rng_tracker False; init_method_std 0.02
init_method_xavier_uniform False; init_model_with_meta_device False
initial_loss_scale 4294967296; inprocess_active_world_size 1; inprocess_barrier_timeout 120
inprocess_granularity 'node'; inprocess_hard_timeout 90; inprocess_heartbeat_interval 30
inprocess_last_call_wait 1; inprocess_max_iterations None; inprocess_restart False
inprocess_termination_grace_time 1; is_hybrid_model False; iter_per_epoch 1250; iteration 100
iterations_to_skip []; keep_fp8_transpose_cache False; kv_channels 4; kv_lora_rank 32
langrl_env_config None; langrl_external_server False
langrl_inference_server_type 'inplace_megatron'; lazy_mpu_init None; legacy_tokenizer False
load None; load_main_params_from_ckpt None; local_rank 0; log_energy False; log_interval 100
log_loss_scale_to_tensorboard True; log_memory_to_tensorboard False
log_num_zeros_in_grad False; log_params_norm False; log_progress False; log_straggler False
log_throughput False; log_timers_to_tensorboard False; log_validation_ppl_to_tensorboard False
log_world_size_to_tensorboard False; logging_level None; loss_scale None
loss_scale_window 1000; lr 0.0001; lr_decay_iters 320; lr_decay_samples None
lr_decay_style 'linear'; lr_warmup_fraction None; lr_warmup_init 0.0; lr_warmup_iters 2
lr_warmup_samples 0; lr_wsd_decay_iters None; lr_wsd_decay_style 'exponential'
main_grads_dtype 'fp32'; main_params_dtype 'fp32'; make_vocab_size_divisible_by 128
mamba_head_dim 64; mamba_num_groups 8; mamba_num_heads None; mamba_state_dim 128
manual_gc False; manual_gc_eval True; manual_gc_interval 0; mask_factor 1.0; mask_prob 0.15
mask_type 'random'; masked_softmax_fusion True; max_position_embeddings 12
max_tokens_to_oom 12000; memory_snapshot_path 'snapshot.pickle'; merge_file 'merges.txt'
micro_batch_size 4; microbatch_group_size_per_vp_stage None
mid_level_dataset_surplus 0.005; min_loss_scale 1.0; min_lr 0.00001; mlp_chunks_for_prefill 1
mmap_bin_files True; mock_data False; moe_aux_loss_coeff 0.0; moe_deepep_num_sms 20
moe_enable_deepep False; moe_expert_capacity_factor None; moe_ffn_hidden_size None
moe_grouped_gemm False; moe_layer_freq 1; moe_layer_recompute False
moe_router_bias_update_rate 0.001; moe_router_dtype None
moe_router_load_balancing_type 'aux_loss'; moe_router_score_function 'softmax'
moe_router_topk 2; moe_token_dispatcher_type 'allgather'; moe_token_drop_policy 'probs'
moe_upcycling_granularity 1; moe_z_loss_coeff None; mrope_section None; mscale 1.0
mscale_all_dim 0.0; mtp_loss_scaling_factor 0.1; mtp_num_layers None
multi_latent_attention False; multiple_validation_sets False; muon_extra_scale_factor 1.0
muon_fp32_matmul_prec 'medium'; muon_momentum 0.9; muon_num_ns_steps 5
muon_scale_mode 'spectral'; muon_split_qkv True; muon_tp_mode 'blockwise'
nccl_all_reduce_for_prefill False; nccl_communicator_config_path None; nccl_ub False
no_load_optim None; no_load_rng None; no_persist_layer_norm False; no_rope_freq None
no_save_optim None; no_save_rng None; non_persistent_ckpt_type None
non_persistent_global_ckpt_dir None; non_persistent_local_ckpt_algo 'fully_parallel'
non_persistent_save_interval None; norm_epsilon 1e-05; normalization 'LayerNorm'
num_attention_heads 4; num_channels 3; num_classes 1000; num_dataset_builder_threads 1
num_distributed_optimizer_instances 1; num_experts None; num_layers 2
num_layers_at_end_in_bf16 1; num_layers_at_start_in_bf16 1
num_layers_per_virtual_pipeline_stage None; num_query_groups 1
num_virtual_stages_per_pipeline_rank None; num_workers 2; object_storage_cache_path None
one_logger_async False; one_logger_project 'megatron-lm'; one_logger_run_name None
onnx_safe None; openai_gelu False; optimizer 'adam'; optimizer_cpu_offload False
optimizer_offload_fraction 1.0; output_bert_embeddings False
overlap_cpu_optimizer_d2h_h2d False; overlap_grad_reduce False
overlap_moe_expert_parallel_comm False; overlap_p2p_comm False
overlap_p2p_comm_warmup_flush False; overlap_param_gather False
overlap_param_gather_with_optimizer_step False; override_opt_param_scheduler False
padded_vocab_size 128; patch_dim 16; per_split_data_args_path None
perform_initialization True; perform_rl_step False; pin_cpu_grads True; pin_cpu_params True
pipeline_model_parallel_comm_backend None; pipeline_model_parallel_layout None
pipeline_model_parallel_size 1; position_embedding_type 'learned_absolute'
pretrained_checkpoint None; profile False; profile_ranks [0]; profile_step_end 12
profile_step_start 10; q_lora_rank None; qk_head_dim 128; qk_l2_norm False
qk_layernorm False; qk_pos_emb_head_dim 64; query_in_block_prob 0.1; quick_geglu False
rampup_batch_size None; rank 0; recompute_granularity None; recompute_method None
recompute_modules ['core_attn']; recompute_num_layers None; record_memory_history False
relative_attention_max_distance 128; relative_attention_num_buckets 32; replication False
replication_factor 2; replication_jump None; rerun_mode 'validate_results'
reset_attention_mask False; reset_position_ids False
result_rejected_tracker_filename None; retriever_report_topk_accuracies []
retriever_score_scaling False; retriever_seq_length 256; retro_add_retriever False
retro_attention_gate 1.0; retro_cyclic_train_iters None
retro_encoder_attention_dropout 0.1; retro_encoder_hidden_dropout 0.1
retro_encoder_layers 2; retro_num_neighbors 2; retro_num_retrieved_chunks 2
retro_project_dir None; retro_verify_neighbor_count True
reuse_grad_buf_for_mxfp8_param_ag False; rl_prompts_per_eval 32
rl_sequence_packing_algo 'fifo'; rl_sequence_packing_bin_size 8192
rope_scaling_factor 8.0; rope_type None; rotary_base 10000; rotary_interleaved False
rotary_percent 1.0; rotary_scaling_factor 1.0; rotary_seq_len_interpolation_factor None
run_workload_inspector_server False; sample_rate 1.0; save 'checkpoints'; save_interval 10
save_retain_interval None; scatter_gather_tensors_in_pipeline True; seed 1234
seq_length 12; sequence_parallel False; sft False
sft_tokenizer_prompt_format 'nemotron-h-aligned'; sgd_momentum 0.9
sharp_enabled_group None; short_seq_prob 0.1; skip_train False; skipped_train_samples 0
softmax_type 'vanilla'; spec None; split '969,30,1'; squared_relu False
start_weight_decay 0.01; straggler_ctrlr_port 65535; straggler_minmax_count 1
strict_fsdp_dtensor_load True; suggested_communication_unit_size None; swiglu False
swin_backbone_type 'tiny'; symmetric_ar_type None; te_rng_tracker False
tensor_model_parallel_size 1; tensorboard_dir 'tensorboard'; tensorboard_log_interval 1
tensorboard_queue_size 1000; test_data_path None; test_mode False; tiktoken_num_special_tokens 1000
tiktoken_pattern None; tiktoken_special_tokens None; timing_log_level 0
timing_log_option 'minmax'; titles_data_path None; tokenizer_metadata None
tokenizer_model None; tokenizer_type 'GPT2BPETokenizer'; torch_fsdp2_reshard_after_forward True
tp_comm_bootstrap_backend 'nccl'; tp_comm_bulk_dgrad True; tp_comm_bulk_wgrad True
tp_comm_overlap False; tp_comm_overlap_ag True; tp_comm_overlap_cfg None
tp_comm_overlap_rs True; tp_comm_overlap_rs_dgrad False; tp_comm_split_ag True
tp_comm_split_rs True; train_data_path None; train_iters 500; train_samples None
train_sync_interval None; transformer_impl 'local'
transformer_pipeline_model_parallel_size 1; trust_remote_code False
untie_embeddings_and_output_weights False; use_checkpoint_args False
use_checkpoint_opt_param_scheduler False; use_cpu_initialization None; use_dist_ckpt False
use_dist_ckpt_deprecated False; use_distributed_optimizer False; use_flash_attn False
use_fused_weighted_squared_relu False; use_legacy_models True; use_legacy_static_engine False
use_megatron_fsdp False; use_mp_args_from_checkpoint_args False; use_one_sent_docs False
use_persistent_ckpt_worker False; use_precision_aware_optimizer False
use_pytorch_profiler False; use_ring_exchange_p2p False; use_rope_scaling False
use_rotary_position_embeddings False; use_sharp False; use_te_activation_func False
use_tokenizer_model_from_checkpoint_args True; use_torch_fsdp2 False
use_torch_optimizer_for_cpu_offload False; use_tp_pp_dp_mapping False; v_head_dim 128
valid_data_path None; variable_seq_lengths False; virtual_pipeline_model_parallel_size None
vision_backbone_type 'vit'; vision_pretraining False; vision_pretraining_type 'classify'
vocab_extra_ids 0; vocab_file 'vocab.json'; vocab_size None; wandb_entity ''
wandb_exp_name ''; wandb_project ''; wandb_save_dir ''; weight_decay 0.01
weight_decay_incr_style 'constant'; wgrad_deferral_limit 0; window_attn_skip_freq None
window_size None; world_size 1; yaml_cfg None
"""

_OF_2023 = """
adam_beta1 0.9; adam_beta2 0.95; adam_eps 1e-08; add_bias_linear False
add_position_embedding False; apply_layernorm_1p False
apply_residual_connection_post_layernorm False; attention_dropout 0.0
attention_softmax_in_fp32 False; bert_binary_head True; bf16 True; bias_dropout_fusion True
bias_gelu_fusion True; checkpoint_activations True; checkpoint_in_cpu False
checkpoint_num_layers 1; clip_grad 1.0; consumed_train_samples 70; consumed_valid_samples 0
data_impl 'infer'; data_parallel_size 2; dataloader_type 'single'
distribute_checkpointed_activations False; distributed_backend 'nccl'
embedding_weights_in_fp32 False; encoder_num_layers 2; eval_interval 1000; eval_iters 10
ffn_hidden_size 64; fp16 False; fp32_residual_connection False; global_batch_size 8
hidden_dropout 0.0; hidden_size 16; hysteresis 2; init_method_std 0.02
initial_loss_scale 4294967296; layernorm_epsilon 1e-05; load 'a'; local_rank 0; log_interval 1
loss_scale_window 1000; lr 0.0003; lr_decay_style 'cosine'; lr_warmup_iters 20
make_vocab_size_divisible_by 128; masked_softmax_fusion True; max_position_embeddings 12
micro_batch_size 4; min_loss_scale 1.0; min_lr 0.00003; num_attention_heads 4; num_layers 2
num_workers 2; optimizer 'adam'; padded_vocab_size 56; params_dtype 'torch.bfloat16'
pipeline_model_parallel_size 2; rank 0; save 'a'; save_interval 100; seed 1234; seq_length 12
split '949,50,1'; tensor_model_parallel_size 2; tensorboard_queue_size 1
tokenizer_type 'GPTSentencePieceTokenizer'; tokenizer_model 'tokenizer.model'; train_iters 250
use_cpu_initialization None; vocab_extra_ids 0; weight_decay 0.1; world_size 8
"""

_MEGATRON_DEEPSPEED = f"""{_OF_2023}
aml_data_download_path None; compression_training False; contigious_checkpointing False
cpu_optimizer False; cpu_torch_adam False; create_moe_param_group False
curriculum_learning_legacy False; custom_token_counting False
data_efficiency_curriculum_learning False; deepscale False; deepscale_config None
deepspeed True; deepspeed_activation_checkpointing True; deepspeed_config 'ds.json'
deepspeed_config_dict {{'train_batch_size': 8}}; deepspeed_mpi False; ds_fused_adam False
ds_inference False; ds_pipeline_enabled True; ds_sequence_parallel_size 1
enable_expert_tensor_parallelism False; expert_interval 2; force_ds_sequence_parallel False
inference False; kd False; kd_alpha_ce 1; kd_beta_ce 1; kd_temp 1.0; kill_switch_file None
load_teacher None; log_optimizer_states_to_tensorboard False; lr_decay_tokens None
lr_warmup_tokens None; mem_efficient_ln True; memory_centric_tiled_linear False
hidden_size_teacher None; num_layers_teacher None; num_attention_heads_teacher None
num_experts_teacher [1]; mlp_type 'standard'; moe_eval_capacity_factor 1.0
moe_expert_parallel_size 1; moe_loss_coeff 0.1; moe_min_capacity 4; moe_token_dropping True
moe_top2_2nd_expert_sampling True; moe_train_capacity_factor 1.0; mos False
no_pipeline_parallel False; normalization 'rmsnorm'; num_experts [1]; num_experts_switch None
num_key_value_heads 2; partition_activations False; profile None; profile_backward False
profile_ranks None; random_ltd False; remote_device 'none'; repeated_dataloader False
reset_iteration False; return_data_index False; rope_theta 500000; rotary_percent 1.0
scattered_embeddings False; split_transformers False; squared_relu False; swiglu True
synchronize_each_layer False; tile_factor 1; topk 1; train_tokens None
universal_checkpoint False; untie_embeddings_and_output_weights True
use_dataset_only False; use_flash_attn_builder False; use_flash_attn_triton False
use_flash_attn_v1 False; use_flash_attn_v2 True; use_pin_memory False
use_rotary_position_embeddings True; use_tutel False; window_size 7
zero_allgather_bucket_size 0.0; zero_contigious_gradients False; zero_reduce_bucket_size 0.0
zero_reduce_scatter False; zero_stage 1; consumed_train_tokens 840; actual_seq_length 12
"""

_BIGSCIENCE = f"""{_OF_2023.replace("add_bias_linear False", "DDP_impl 'local'")}
abort_on_unmet_fused_kernel_constraints False; codecarbon_dir None
curriculum_learning False; deepspeed True; deepspeed_activation_checkpointing True
embed_layernorm True; glu_activation None; inference False; kill_switch_path None
layernorm_tp_auto_sync False; loss_on_targets_only False; mean_noise_span_length None
noise_density None; pad_vocab_size_to None; pp_partition_method None
position_embedding_type 'alibi'; reweight_loss_based_on_position_frequency False
skip_train_iteration_range None; sync_tp_duplicated_parameters True
test_weighted_split_paths None; train_weighted_split_paths None; use_bnb_optimizer False
valid_num_workers 2; valid_weighted_split_paths None; finetune_on_bfloat False
eval_fp32 False; eval_only None; gigaflos_no_embeds 0; lr_decay_samples 1000
lr_warmup_samples 100; rampup_batch_size ['192', '16', '9765625']; zero_stage 0
"""


_NEOX = """
pipe_parallel_size 2; model_parallel_size 2; pipe_partition_method 'type:transformer|mlp'
world_size 8; is_pipe_parallel True; sequence_parallel False; expert_interval 2
precision 'bfloat16'; num_layers 2; hidden_size 16; intermediate_size None; mlp_multiple_of 1
expansion_factor None; num_attention_heads 4; num_kv_heads None; seq_length 12
sliding_window_width None; max_position_embeddings 12; norm 'layernorm'; layernorm_fusion True
rmsnorm_fusion False; use_qk_layernorm False; layernorm_epsilon 1e-05; rms_norm_epsilon 1e-08
scalenorm_epsilon 1e-08; pos_emb 'rotary'; rpe_num_buckets 32; rpe_max_distance 128
opt_pos_emb_offset 0; no_weight_tying True; attention_config [[['flash'], 2]]
sparsity_config {'block': 16}; num_unique_layers None; param_sharing_style 'grouped'
make_vocab_size_divisible_by 128; activation 'gelu'; use_flashattn_swiglu False
scaled_upper_triang_masked_softmax_fusion True; scaled_masked_softmax_fusion True
bias_gelu_fusion True; bias_dropout_fusion True; rope_fusion True; fp16_lm_cross_entropy False
init_method_std 0.02; apply_query_key_layer_scaling False; use_cpu_initialization False
attention_softmax_in_fp32 False; rotary_pct 0.5; rotary_emb_base 10000
rotary_save_freqs_buffer False; init_method 'small_init'; output_layer_init_method 'wang_init'
gmlp_attn_dim 64; gpt_j_residual True; gpt_j_tied False; use_bias_in_norms True
use_bias_in_attn_linear True; use_bias_in_mlp True; mlp_type 'regular'; soft_prompt_tuning None
mamba_selective_fp32_params True; mamba_use_bias_in_conv True; mamba_use_bias_in_linears False
output_layer_parallelism 'column'; dim_att None; head_size None; ffn_dim None
optimizer_type 'adam'; use_bnb_optimizer False; zero_stage 1; zero_reduce_scatter True
zero_contiguous_gradients True; zero_reduce_bucket_size 500000; zero_allgather_bucket_size 500000
lr 0.0006; lr_decay_style 'cosine'; lr_decay_iters 143000; lr_decay_fraction None; min_lr 6e-05
warmup 0.01; override_lr_scheduler False; use_checkpoint_lr_scheduler False; use_wandb True
wandb_group 'a'; wandb_team 'b'; wandb_project 'neox'; wandb_host 'https://api.wandb.ai'
wandb_init_all_ranks False; git_hash 'abc'; log_dir 'logs'; tensorboard_dir 'tb'
use_comet None; comet_project 'c'; comet_tags ['d']; log_interval 100; log_grad_pct_zeros False
log_gradient_noise_scale False; gradient_noise_scale_n_batches 5
gradient_noise_scale_cpu_offload False; memory_profiling False; memory_profiling_path 'p'
profile False; profile_step_start 10; profile_step_stop 12; distributed_backend 'nccl'
local_rank 0; rank 0; lazy_mpu_init False; short_seq_prob 0.1; eod_mask_loss False
adlr_autoresume False; adlr_autoresume_interval 1000; seed 1234; onnx_safe False
deepscale False; deepspeed_mpi False; deepspeed_slurm True; user_script 'train.py'
iteration 7; do_train True; do_valid True; do_test True; global_num_gpus 8
tokenizer_type 'HFTokenizer'; padded_vocab_size 56; data_path 'd'; use_shared_fs True
train_data_paths ['a']; train_label_data_paths None; test_data_paths ['b']
valid_data_paths ['c']; train_data_weights [1.0]; weight_by_num_documents False
weighted_sampler_alpha 1.0; data_impl 'mmap'; pack_impl 'packed'; dataset_impl 'gpt2'
train_impl 'normal'; dpo_fp32 True; dpo_beta 0.1; kto_fp32 True; kto_desirable_weight 1.0
kto_undesirable_weight 1.0; kto_beta 0.1; z_loss 0.0; allow_chopped True; mmap_warmup False
save 'checkpoints'; s3_path None; s3_chunk_size 104857600; config_files {'a.yml': 'x'}
load 'checkpoints'; checkpoint_validation_with_forward_pass False; checkpoint_scale 'linear'
checkpoint_factor 1000; extra_save_iters [1, 2, 4]; no_save_optim False; finetune False
batch_size 4; train_iters 143000; train_epochs None; eval_iters 10; keep_last_n_checkpoints 4
eval_interval 1000; split '969,30,1'; vocab_file 'tokenizer.json'; merge_file None
num_workers 2; exit_interval None; attention_dropout 0.0; hidden_dropout 0.0; weight_decay 0.1
checkpoint_activations True; checkpoint_num_layers 1; deepspeed_activation_checkpointing True
contiguous_checkpointing False; checkpoint_in_cpu False; synchronize_each_layer True
profile_backward False; partition_activations True; gas 1; clip_grad 1.0; hysteresis 2
dynamic_loss_scale True; loss_scale None; loss_scale_window 1000.0; min_scale 1.0
char_level_ppl False; use_mup False; coord_check False; save_base_shapes False
base_shapes_file None; mup_init_scale 1.0; mup_attn_temp 1.0; mup_output_temp 1.0
mup_embedding_mult 1.0; mup_rp_embedding_mult 1.0; mup_width_scale 2; text_gen_type 'unconditional'
temperature 0.9; top_p 0.9; top_k 40; maximum_tokens 64; prompt_end '.'; num_samples 1
sample_output_file 'samples.txt'; recompute False; eval_results_prefix 'r'; eval_tasks ['lambada']
moe_top_k 1; moe_num_experts 1; moe_loss_coeff 0.1; moe_use_residual True; moe_type 'megablocks'
create_moe_param_group True; deepspeed True; train_batch_size 1024
train_micro_batch_size_per_gpu 32; gradient_accumulation_steps 1; optimizer {'type': 'Adam'}
scheduler {'type': 'x'}; fp32_allreduce False; prescale_gradients False
gradient_predivide_factor 1.0; fp16 {'enabled': True}; bf16 {'enabled': True}; amp None
gradient_clipping 1.0; zero_optimization {'stage': 1}; curriculum_learning None
curriculum_seqlen 12; steps_per_print 10; wall_clock_breakdown True; dump_state False
flops_profiler {'enabled': True}; autotuning {'enabled': False}
activation_checkpointing {'partition': True}; data_efficiency {'enabled': False}
tensorboard {'enabled': True}; wandb {'enabled': True}; csv_monitor {'enabled': True}
elasticity {'enabled': False}; comms_logger {'enabled': True}; checkpoint {'tag': 'x'}
data_types {'grad_accum_dtype': 'fp32'}; deepspeed_extra_args {'a': 1}; hostfile 'h'; include 'i'
num_nodes -1; num_gpus 8; master_port 29500; launcher 'pdsh'; detect_nvlink_pairs False
autotuning_run 'run'; no_ssh_check True; comment 'c'; account 'a'; te_columnparallel False
"""


def parsed(text: str) -> dict[str, object]:
    """Arguments by name."""
    entries = (entry.strip() for line in text.splitlines() for entry in line.split(";"))
    pairs = (entry.split(" ", 1) for entry in entries if entry)
    return {name: ast.literal_eval(value) for name, value in pairs}


NAMESPACES = {
    "Megatron-LM": parsed(_MEGATRON_LM),
    "Megatron-DeepSpeed": parsed(_MEGATRON_DEEPSPEED),
    "BigScience": parsed(_BIGSCIENCE),
}
"""Arguments by program."""

NEOX = parsed(_NEOX)
"""Settings of GPT-NeoX."""
