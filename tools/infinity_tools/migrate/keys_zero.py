"""Keys for the placement and transfer of state: `zero_optimization`, `aio`, activation checkpointing."""

from __future__ import annotations

from infinity_tools.migrate.keys import Key, lacking, translated, unneeded

_ZERO, _PARAM, _OPTIMIZER = (
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
)
_PLAN = "infinity records the first step and plans reads, caching and eviction from it"
_FSDP = "FSDP2 gathers and reduces one FSDP module (a fully_shard call) at a time and overlaps this with computation"
_FSDP_MODULES = "FSDP2 gathers all parameters of a module passed to fully_shard together"
_QUANTISED = "communication between ranks is not quantized"
_EXACT = "remove it; communication is exact but transfers more bytes"

ZERO: list[Key] = [
    translated(f"{_ZERO}.stage", "fully_shard(layer, ...), fully_shard(model, ...)",
               "FSDP2 shards parameters, gradients and optimizer state, as stage 3 does", "stage"),
    translated(f"{_ZERO}.cpu_offload", "memory.host_bytes", "same as offload_optimizer.device = cpu", "flag"),
    translated(f"{_ZERO}.cpu_offload_param", "memory.host_bytes", "same as offload_param.device = cpu", "flag"),
    *unneeded(_ZERO, "cpu_offload_params", "the old name of offload_param"),
    *unneeded(_ZERO, "cpu_offload_use_pin_memory", "the host cache is always pinned"),
    *unneeded(_ZERO, "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters "
              "stage3_max_reuse_distance max_reuse_distance sub_group_size", _PLAN),
    *unneeded(_ZERO, "stage3_param_persistence_threshold param_persistence_threshold "
              "stage3_model_persistence_threshold model_persistence_threshold",
              "small parameters share pages with other parameters of their FSDP module; pages that fit in the host "
              "cache stay there"),
    *unneeded(_ZERO, "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
              "allgather_partitions allgather_bucket_size overlap_comm round_robin_gradients "
              "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential "
              "allgather_sequential grad_hooks legacy_stage1", _FSDP),
    *unneeded(_ZERO, "stage3_module_granularity_threshold module_granularity_threshold leaf_module", _FSDP_MODULES),
    *unneeded(_ZERO, "memory_efficient_linear", "the model uses PyTorch's own layers"),
    *unneeded(_ZERO, "ignore_unused_parameters", "parameters without a gradient are left unchanged, as without "
              "infinity"),
    *unneeded(_ZERO, "override_module_apply", "build the model under torch.device(\"meta\"); infinity.offload "
              "initializes one FSDP module at a time"),
    *unneeded(_ZERO, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
              "specific to DeepSpeed; an infinity checkpoint contains the master weights and loads on any number of "
              "ranks"),
    *unneeded(_ZERO, "log_trace_cache_warnings enable_sanity_checks",
              "divergences from the plan are handled and counted; checks are always on"),
    *(translated(f"{_ZERO}.{name}", "infinity export PATHS --out FOLDER",
                 "writes the weights of a checkpoint for from_pretrained", "flag")
      for name in ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
                   "stage3_gather_fp16_weights_on_model_save")),
    *lacking(_ZERO, "zero_hpz_partition_size", "weights are gathered from all ranks",
             "remove it; values are the same, with more network traffic", off=(0, 1)),
    *lacking(_ZERO, "mics_shard_size", "state is sharded across all ranks",
             "remove it; values are the same, with more network traffic", off=(-1, 0, 1)),
    *lacking(_ZERO, "mics_hierarchical_params_gather", "state is sharded across all ranks",
             "remove it; values are the same"),
    *lacking(_ZERO, "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients", _QUANTISED,
             _EXACT, changes=True),
    *lacking(_ZERO, "zeropp_loco_param", _QUANTISED, _EXACT, switch="any", changes=True),
    *lacking(_ZERO, "zenflow", "it delays most updates and uses older gradients; here every update uses the "
             "gradients of the same step", "remove it; updates overlap with computation anyway "
             "(update.schedule)", switch="any", changes=True),
    *lacking(_ZERO, "save_muon_momentum_buffer_in_memory", "the state of every optimizer is paged",
             "remove it; state that fits in the host cache stays there"),
]  # fmt: skip

OFFLOAD: list[Key] = [
    *(translated(f"{section}.device", "storage.paths, memory.host_bytes",
                 "nvme: parameters and optimizer state are stored there, in pages. cpu: a host cache as large as the "
                 "state keeps all of it in memory. Parameters and optimizer state share the paths and the host cache",
                 "device") for section in (_PARAM, _OPTIMIZER)),
    *(translated(f"{section}.nvme_path", "storage.paths",
                 "one list of paths for all pages: the path of offload_param, then the path of offload_optimizer, "
                 "without duplicates. DeepSpeed's subfolder zero_stage_N is not used", "path")
      for section in (_PARAM, _OPTIMIZER)),
    *(translated(f"{_PARAM}.{name}", "memory.host_bytes",
                 "an estimate: the bytes of DeepSpeed's parameters in memory, (max_in_cpu + buffer_count x "
                 "buffer_size) x 2, or x 4 in fp32; if all have DeepSpeed's defaults, infinity's default applies",
                 "count")
      for name in ("max_in_cpu", "buffer_count", "buffer_size")),
    *unneeded(_OPTIMIZER, "buffer_count", "the slots of the host cache take the place of buffers; their number "
              "follows from its size",
              "memory.host_bytes"),
    *(key for section in (_PARAM, _OPTIMIZER)
      for key in unneeded(section, "pin_memory", "the host cache is always pinned")),
    *unneeded(_OPTIMIZER, "pipeline_read pipeline_write pipeline fast_init", _PLAN),
    *lacking(_OPTIMIZER, "ratio", "all updates run on one device, the CPU or a GPU", "update.device",
             off=(1, 1.0)),
    *unneeded(_OPTIMIZER, "super_offload cpuadam_cores_perc", "updates on the CPU use update.cores cores, by default "
              "up to 8 if the model runs on a GPU", "update.cores"),
]  # fmt: skip

AIO: list[Key] = [
    translated("aio.block_size", "storage.request_bytes",
               "size of a request; DeepSpeed's default of 1 MiB is replaced by infinity's default of 2 MiB", "count"),
    translated("aio.queue_depth", "storage.queue_depth",
               "requests in flight; DeepSpeed's default of 8 is replaced by infinity's default of 32", "count"),
    *unneeded("aio", "thread_count intra_op_parallelism single_submit overlap_events",
              "a few threads submit requests to io_uring; storage.engine = \"threads\" is the alternative",
              "storage.engine"),
    *lacking("aio", "use_gds", "GPUDirect Storage is not used; pages go through the host cache",
             "remove it; values are the same"),
]  # fmt: skip

ACTIVATIONS: list[Key] = [
    *lacking("activation_checkpointing", "partition_activations",
             "specific to DeepSpeed's tensor parallelism", "torch.utils.checkpoint in your model, or "
             "infinity.micro_batches, which keeps only the layer inputs"),
    translated("activation_checkpointing.cpu_checkpointing", "activations.tier",
               "host: layer inputs are kept in the host cache until backward; nvme: also on the drives", "flag"),
    *unneeded("activation_checkpointing", "contiguous_memory_optimization number_checkpoints "
              "synchronize_checkpoint_boundary profile",
              "specific to DeepSpeed; use torch.utils.checkpoint or model.gradient_checkpointing_enable(), but not "
              "with infinity.micro_batches, which recomputes activations itself"),
]  # fmt: skip
