"""Keys about where state lies and how it is moved: `zero_optimization`, `aio`, activation checkpointing."""

from __future__ import annotations

from infinity_tools.migrate.keys import Key, lacking, translated, unneeded

_ZERO, _PARAM, _OPTIMIZER = (
    "zero_optimization",
    "zero_optimization.offload_param",
    "zero_optimization.offload_optimizer",
)
_PLAN = "the first step is recorded, and the plan made from it says what is read, kept and evicted when"
_FSDP = "FSDP2 gathers and reduces one FSDP module (a fully_shard call) at a time, beside computation"
_FSDP_MODULES = "what fully_shard is called on is gathered as a whole"
_QUANTISED = "what is sent between ranks is not quantised here"
_EXACT = "leave it out; communication is exact, and takes more bytes"

ZERO: list[Key] = [
    translated(f"{_ZERO}.stage", "fully_shard(layer, ...), fully_shard(model, ...)",
               "FSDP2 shards parameters, gradients and optimizer state, as stage 3 does", "stage"),
    translated(f"{_ZERO}.cpu_offload", "memory.host_bytes", "as offload_optimizer.device = cpu", "flag"),
    translated(f"{_ZERO}.cpu_offload_param", "memory.host_bytes", "as offload_param.device = cpu", "flag"),
    *unneeded(_ZERO, "cpu_offload_params", "as offload_param, of old versions"),
    *unneeded(_ZERO, "cpu_offload_use_pin_memory", "the host cache is always pinned"),
    *unneeded(_ZERO, "stage3_prefetch_bucket_size prefetch_bucket_size stage3_max_live_parameters max_live_parameters "
              "stage3_max_reuse_distance max_reuse_distance sub_group_size", _PLAN),
    *unneeded(_ZERO, "stage3_param_persistence_threshold param_persistence_threshold "
              "stage3_model_persistence_threshold model_persistence_threshold",
              "small parameters are in the pages of their FSDP module; what fits the host cache stays in memory"),
    *unneeded(_ZERO, "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce "
              "allgather_partitions allgather_bucket_size overlap_comm round_robin_gradients "
              "stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params stage3_allgather_sequential "
              "allgather_sequential grad_hooks legacy_stage1", _FSDP),
    *unneeded(_ZERO, "stage3_module_granularity_threshold module_granularity_threshold leaf_module", _FSDP_MODULES),
    *unneeded(_ZERO, "memory_efficient_linear", "layers are torch's own"),
    *unneeded(_ZERO, "ignore_unused_parameters", "parameters without a gradient are left as they are, as in memory"),
    *unneeded(_ZERO, "override_module_apply", "build the model under torch.device(\"meta\"); infinity.offload sets its "
              "values FSDP module by FSDP module"),
    *unneeded(_ZERO, "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
              "of DeepSpeed's checkpoints; a checkpoint has the master, and loads on any number of ranks"),
    *unneeded(_ZERO, "log_trace_cache_warnings enable_sanity_checks",
              "what differs from the plan is handled and counted; checks are always on"),
    *(translated(f"{_ZERO}.{name}", "infinity export PATHS --out FOLDER",
                 "writes the weights of a checkpoint for from_pretrained", "flag")
      for name in ("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save",
                   "stage3_gather_fp16_weights_on_model_save")),
    *lacking(_ZERO, "zero_hpz_partition_size", "weights are gathered from all ranks",
             "leave it out: values are the same; more goes over the network", off=(0, 1)),
    *lacking(_ZERO, "mics_shard_size", "state is sharded over all ranks",
             "leave it out: values are the same; more goes over the network", off=(-1, 0, 1)),
    *lacking(_ZERO, "mics_hierarchical_params_gather", "state is sharded over all ranks",
             "leave it out: values are the same"),
    *lacking(_ZERO, "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients", _QUANTISED,
             _EXACT, changes=True),
    *lacking(_ZERO, "zeropp_loco_param", _QUANTISED, _EXACT, switch="any", changes=True),
    *lacking(_ZERO, "zenflow", "it updates most parameters later, with older gradients; here every update is of this "
             "step", "leave it out; updates overlap with computation anyway (update.schedule)", switch="any",
             changes=True),
    *lacking(_ZERO, "save_muon_momentum_buffer_in_memory", "the state of every optimizer is paged",
             "leave it out: what fits the host cache stays there"),
]  # fmt: skip

OFFLOAD: list[Key] = [
    *(translated(f"{section}.device", "storage.paths, memory.host_bytes",
                 "nvme: pages lie there. cpu: a host cache as large as the state keeps it in memory. There is one home for "
                 "parameters and optimizer state: pages are cached by when they are used, not by what they are",
                 "device") for section in (_PARAM, _OPTIMIZER)),
    *(translated(f"{section}.nvme_path", "storage.paths",
                 "one list for all pages: those of parameters first, without repetition. It is taken as it is; "
                 "DeepSpeed's own folder below it, zero_stage_N, is not used", "path")
      for section in (_PARAM, _OPTIMIZER)),
    *(translated(f"{_PARAM}.{name}", "memory.host_bytes",
                 "an estimate: the bytes of DeepSpeed's parameters in memory, (max_in_cpu + buffer_count x "
                 "buffer_size) x 2, or x 4 in fp32", "count")
      for name in ("max_in_cpu", "buffer_count", "buffer_size")),
    *unneeded(_OPTIMIZER, "buffer_count", "buffers are pages of the host cache, whose number is derived",
              "memory.host_bytes"),
    *(key for section in (_PARAM, _OPTIMIZER) for key in unneeded(section, "pin_memory", "the host cache is always pinned")),
    *unneeded(_OPTIMIZER, "pipeline_read pipeline_write pipeline fast_init", _PLAN),
    *lacking(_OPTIMIZER, "ratio", "all updates run in one place, on the CPU or on a GPU", "update.device",
             off=(1, 1.0)),
    *unneeded(_OPTIMIZER, "super_offload cpuadam_cores_perc", "the thread for updates takes update.cores, by "
              "default up to 8 where a GPU computes", "update.cores"),
]  # fmt: skip

AIO: list[Key] = [
    translated("aio.block_size", "storage.request_bytes",
               "bytes of a request; the default here is 2 MiB, DeepSpeed's 1 MiB", "count"),
    translated("aio.queue_depth", "storage.queue_depth", "requests in flight; the default here is 32, DeepSpeed's 8",
               "count"),
    *unneeded("aio", "thread_count intra_op_parallelism single_submit overlap_events",
              "a few threads submit to io_uring; storage.engine = \"threads\" is the other engine", "storage.engine"),
    *lacking("aio", "use_gds", "no GPUDirect: pages go through the host cache", "leave it out: values are the same"),
]  # fmt: skip

ACTIVATIONS: list[Key] = [
    *lacking("activation_checkpointing", "partition_activations",
             "it is for tensor parallelism of DeepSpeed's kind", "torch.utils.checkpoint in your model, or "
             "infinity.micro_batches, which keeps the inputs of layers only"),
    translated("activation_checkpointing.cpu_checkpointing", "activations.tier",
               "host: inputs of layers wait in the host cache; nvme: on the drives too", "flag"),
    *unneeded("activation_checkpointing", "contiguous_memory_optimization number_checkpoints "
              "synchronize_checkpoint_boundary profile",
              "of DeepSpeed's own checkpointing; use torch.utils.checkpoint or model.gradient_checkpointing_enable(), "
              "but not together with infinity.micro_batches, which recomputes by itself"),
]  # fmt: skip
