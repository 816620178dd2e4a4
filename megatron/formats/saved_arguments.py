"""The rule for arguments that other trainers save with their checkpoints, and for their settings:
each is read, is known not to change the network, or is refused by name.

A trainer saves hundreds, of which few describe the network, and forks add others. An unknown one
has no effect if it has the value of a flag that was not given; any other value is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import translate
from functools import cache
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import CheckpointError
from megatron.config import FLAG_CLASSES, LegacyFlags, ModelFlags
from megatron.config.run import FLAG_FIELDS
from megatron.config.unknown_flags import NETWORKS, OF_2019, REFUSED

HARMLESS_ARGUMENTS = "MEGATRON_HARMLESS_ARGUMENTS"
"""Environment variable with names of arguments that a user knows not to change the network."""

_OFF = ("", "no_", "disable_", "use_")
"""Beginnings of flags whose argument is called by the rest."""

_PATTERNS = tuple(
    pattern.removeprefix("--").replace("-", "_")
    for row in (REFUSED | OF_2019)
    if row not in NETWORKS
    for pattern in row.split()
)
"""Flags of other trainers that do not describe the network, by argument."""

_WITH_A_SWITCH = (
    # Experts, other kinds of layers and of attention, muP: without the argument that chooses them,
    # which is checked, these have no effect.
    "moe_* enable_expert_tensor_parallelism expert_interval topk create_moe_param_group use_tutel "
    "ep_* overlap_moe_* mamba_* linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim "
    "linear_num_*_heads linear_attention_freq dsa_* csa_* q_lora_rank kv_lora_rank qk_head_dim "
    "qk_pos_emb_head_dim v_head_dim original_max_position_embeddings mscale mscale_all_dim "
    "beta_fast beta_slow yarn_rotary_scaling_factor yarn_original_max_position_embeddings "
    "yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim "
    "yarn_correction_range_round_to_int cache_mla_latents mla_* mtp_loss_scaling_factor "
    "mtp_detach_heads relative_attention_* rpe_* "
    # Retro, retrieval and vision, which have programs of their own.
    "retro_* ict_* biencoder_* titles_data_path query_in_block_prob use_one_sent_docs "
    "evidence_data_path retriever_* block_data_path embedding_path indexer_* faiss_use_gpu "
    "num_classes img_h img_w img_dim num_channels patch_dim classes_fraction "
    "data_per_class_fraction data_sharding head_lr_mult vision_* swin_* dino_* "
    "mask_factor iter_per_epoch "
).split()

_TRAINING = (
    # Processes, layouts, kernels and dtypes.
    "rank local_rank global_rank node_rank world_size local_world_size master_addr master_port "
    "model_type *_parallel_size *_parallel_split_rank *_pipeline_num_layers "
    "num_layers_in_*_pipeline_stage num_layers_per_virtual_* num_virtual_stages_* num_layers_at_* "
    "first_last_layers_bf16 params_dtype fp8* fp4* te_* tp_comm_* overlap_* *_fusion cuda_graph_* "
    "*_cuda_graph* variable_seq_lengths async_tensor_model_parallel_allreduce *_layer_norm_kernel "
    "persist_layer_norm attention_backend transformer_impl perform_initialization "
    "barrier_with_L1_time cp_* nccl_* fsdp_* torch_fsdp2_* "
    "*_pipeline_split microbatch_* pp_* partition_method custom_partition deprecated_* "
    "*_deprecated use_legacy_models *_process_groups symmetric_* cpu_offload* checkpoint_* "
    "activation_checkpointing recompute* scattered_embeddings distribute_saved_activations "
    "distribute_checkpointed_* contiguous_buffers_in_local_ddp *_tp_auto_sync "
    "sync_tp_duplicated_parameters abort_on_unmet_fused_kernel_constraints "
    "apply_query_key_layer_scaling qk_clip* "
    # Optimizers, schedules, batches and data.
    "lr lr_* *_lr warmup* *_weight_decay weight_decay* clip_grad adam_* cpu_torch_adam sgd_* "
    "muon_* optimizer* *_optimizer* exp_avg* loss_scale* *_loss_scale *_loss_coeff hysteresis "
    "iteration iterations_* embedding_init_method_std *_batch_size "
    "*_batch_size_* train_* valid_* test_* eval_* do_train do_valid do_test consumed_* "
    "curr_iteration skip_train* skipped_* seed split data_path data_impl data_parallel_* "
    "*_data_path *_data_paths num_workers dataloader_type eod_mask_loss mask_prob short_seq_prob "
    "sample_rate reweight_loss_* loss_on_targets_only noise_density mean_noise_span_length "
    "masked_lm_prob mmap_* special_tokens_file vocab_* padded_vocab_size unpadded_vocab_size "
    "tokenizer* merge_file tiktoken_* legacy_tokenizer pad_vocab_size_to custom_token_counting "
    "sft* rl_* grpo_* ppo_* rlhf_* RLHF actor_* critic_* encoder_num_layers encoder_seq_length "
    "curriculum_* actual_seq_length random_ltd* compression_training data_efficiency* *_teacher "
    "teacher_* kd kd_* freeze_* multiple_validation_sets object_storage_cache_path "
    "max_prompt_seq_len "
    # DeepSpeed, saving, logging, watching.
    "deepspeed* deepscale* ds_* zero_stage zero_reduce_* zero_contiguous_* zero_allgather_* "
    "remote_device pin_memory universal_checkpoint no_pipeline_parallel "
    "memory_centric_tiled_linear tile_factor save save_* load load_* ckpt_* dist_ckpt* finetune "
    "finetune_* pretrained_checkpoint log_interval log_dir log_level* log_*_to_tensorboard "
    "log_params_* log_param_norm log_num_zeros_* log_throughput log_progress log_energy "
    "log_grad_* log_gradient_* log_optimizer_* log_straggler log_memory_* logging_* *_logger_* "
    "timing_* gigaflos_* num_floating_point_operations_so_far tensorboard* wandb* comet* "
    "codecarbon_* profile profile_* memory_snapshot_path exit_interval exit_duration_in_mins "
    "kill_switch_* adlr_* check_weight_hash_* replication_factor async_save legacy_static_engine "
    "disable_chunked_prefill bert_load bert_embedder_type version git_hash *_dir *_path *_file "
    "*_files *_filename "
).split()
"""Patterns of arguments about training, not about the network. An ending such as ``_file`` is that
of all arguments that name a file."""

_KNOWN = re.compile("|".join(map(translate, (*_PATTERNS, *_TRAINING, *_WITH_A_SWITCH))))


class SavedArguments(Mapping[str, Any]):
    """Arguments by name, which records those that are read."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content, self._read = content, set[str]()

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def unused(self, *names: str) -> None:
        """Accepts arguments that have no effect together with the others."""
        self._read.update(names)

    def refuse(self, where: Path, network: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuses arguments that change the network: those in ``network``, unless they have one of
        its harmless values or that of a flag that was not given. Raises CheckpointError naming
        one."""
        for name, harmless in network.items():
            value = self._content.get(name)
            if not (is_unset(value) or _is_one_of(value, harmless) or name in _named_harmless()):
                raise CheckpointError(
                    f"{where}: the network has {name} {value!r:.200}, which cannot be represented"
                )
        self._read.update(network)

    def refuse_the_rest(self, where: Path, remedy: str = "") -> None:
        """Refuses what nothing has read and what may change the network. Raises CheckpointError
        naming it."""
        unknown = [
            f"{name} = {value!r:.100}"
            for name, value in self._content.items()
            if name not in self._read and not is_unset(value) and not is_harmless(str(name))
            if name not in _named_harmless()
        ]
        if unknown:
            more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
            raise CheckpointError(
                f"{where}: the effect of {', '.join(unknown[:10])}{more} on the network is not "
                f"known; if it has none, {remedy}put the names into the environment variable "
                f"{HARMLESS_ARGUMENTS}"
            )


def _named_harmless() -> list[str]:
    return os.environ.get(HARMLESS_ARGUMENTS, "").replace(",", " ").split()


_PLAIN = (bool, int, float, str, list, tuple, dict)


def is_unset(value: Any) -> bool:
    """True for the value of a flag that was not given: none, false, zero or empty."""
    return value is None or (isinstance(value, _PLAIN) and not value)


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    """Equality that tells true from 1."""
    kinds = isinstance(value, bool), isinstance(value, _PLAIN)
    return any((isinstance(one, bool), True) == kinds and value == one for one in known)


def is_harmless(name: str) -> bool:
    """True if an argument is known not to change the network."""
    spellings = {f"{off}{name}" for off in _OFF} | {name.removeprefix("use_")}
    return name in _flags() or any(_KNOWN.match(spelled) for spelled in spellings)


@cache
def _flags() -> frozenset[str]:
    """Arguments of this project's flags that are not about the network, and of those of other
    trainers that it accepts without effect."""
    assert ModelFlags in FLAG_CLASSES and LegacyFlags in FLAG_CLASSES
    network = ModelFlags.__dataclass_fields__
    names = set()
    for field, _ in FLAG_FIELDS.values():
        if field.name in network:
            continue
        rows = (field.metadata["flag"], field.metadata["off"], *field.metadata["aliases"])
        flags = " ".join(filter(None, rows)).split()
        names |= {field.name, *(flag[2:].replace("-", "_") for flag in flags)}
    stripped = {name.removeprefix(off) for name in names for off in _OFF[1:]}
    return frozenset((names | stripped) - network.keys())
