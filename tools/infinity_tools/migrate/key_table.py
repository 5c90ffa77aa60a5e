"""Table of the keys of a DeepSpeed configuration."""

from __future__ import annotations

from infinity_tools.migrate.keys import Key, Table, lacking, translated, unneeded

# Training: batches, optimizer, scheduler, precision #

_BATCH = "each rank's batch contains the sequences of all its micro-batches and is split inside the model"
_FP16 = (
    "float16 requires loss scaling, which DeepSpeed does automatically; infinity does not, and float16 is not tested"
)
_BF16_ONLY = "train in bf16, which has the range of fp32 (bf16.enabled), or scale the loss with torch.amp.GradScaler"
_RATE = "the learning rate equals DeepSpeed's at every step"
_CALL = "passed to the optimizer"
_CLASS = "passed to the optimizer if its class accepts it"

BATCHES: list[Key] = [
    translated("train_batch_size", "your DataLoader's batch_size, and infinity.micro_batches(model, n)", _BATCH,
               "count",
               auto="args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps"),
    translated("train_micro_batch_size_per_gpu", "your DataLoader's batch_size", _BATCH, "count",
               auto="args.per_device_train_batch_size"),
    translated("gradient_accumulation_steps", "infinity.micro_batches(model, n)",
               "each layer processes all micro-batches before the next layer starts, so weight traffic does not grow "
               "with their number",
               "count", auto="args.gradient_accumulation_steps"),
    *unneeded("", "managed_gradient_accumulation", "your loop determines when a step ends"),
    translated("gradient_clipping", "optimizer.clip_grad_norm_(x)",
               "clips by the same norm, computed across all ranks; updates then run in the next forward "
               "(update.schedule)",
               "number", auto="args.max_grad_norm"),
    *lacking("", "dataloader_drop_last", "your code creates the DataLoader", "DataLoader(drop_last=True)"),
]  # fmt: skip

OPTIMIZER: list[Key] = [
    translated("optimizer.type", "torch.optim.X(model.parameters(), ...)",
               "Adam is AdamW unless adam_w_mode is false, as in DeepSpeed",
               "text"),
    *unneeded("optimizer", "legacy_fusion", "specific to DeepSpeed's fp16 optimizers"),
    translated("optimizer.params.lr", "lr=", _CALL, "number", auto="args.learning_rate"),
    translated("optimizer.params.betas", "betas=", _CALL, "pair", auto="(args.adam_beta1, args.adam_beta2)"),
    translated("optimizer.params.eps", "eps=", _CALL, "number", auto="args.adam_epsilon"),
    translated("optimizer.params.weight_decay", "weight_decay=",
               "passed to the optimizer; without it, DeepSpeed's default of 0 is passed, which differs from torch's "
               "AdamW",
               "number", auto="args.weight_decay"),
    translated("optimizer.params.momentum", "momentum=", _CLASS, "number"),
    translated("optimizer.params.dampening", "dampening=", _CLASS, "number"),
    translated("optimizer.params.nesterov", "nesterov=", _CLASS, "flag"),
    translated("optimizer.params.amsgrad", "amsgrad=", _CLASS, "flag"),
    translated("optimizer.params.alpha", "alpha=", _CLASS, "number"),
    translated("optimizer.params.centered", "centered=", _CLASS, "flag"),
    translated("optimizer.params.lr_decay", "lr_decay=", _CLASS, "number"),
    translated("optimizer.params.adam_w_mode", "torch.optim.AdamW, or Adam",
               "whether weight decay is decoupled from the gradient", "flag"),
    *unneeded("optimizer.params", "torch_adam", "the optimizer is always torch's"),
    *unneeded("optimizer.params", "set_grad_none", "optimizer.zero_grad() drops gradients"),
    translated("optimizer.params.max_grad_norm", "optimizer.clip_grad_norm_(x)", "same as gradient_clipping", "number"),
    *lacking("optimizer.params", "bias_correction", "torch's optimizers always apply bias correction",
             "remove it", off=(True,), takes="flag", changes=True),
    *lacking("optimizer.params", "fp32_optimizer_states", "optimizer state is kept in fp32",
             'state.format = "bf16-moments" stores moments in 16 bits with stochastic rounding', off=(True,)),
    *lacking("optimizer.params", "muon_lr adam_lr", "specific to Muon; your code creates its two optimizers",
             "the lr= arguments of torch.optim.Muon and torch.optim.AdamW", off=(), changes=True),
    *lacking("optimizer.params", "ns_method", "specific to Muon; torch has only one method to orthogonalize a matrix",
             "remove it", off=("standard",), changes=True),
    *lacking("optimizer.params", "max_coeff min_coeff", "specific to LAMB, which comes from another package",
             "remove them", off=(), changes=True),
    *lacking("optimizer.params", "freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min "
             "factor_threshold var_freeze_step var_update_scaler local_step_scaler local_step_clipper",
             "specific to optimizers with compressed communication, which are not supported", "AdamW", off=(),
             changes=True),
    *unneeded("", "zero_allow_untested_optimizer",
              "infinity.offload checks every optimizer and raises UnsupportedError for unsupported ones"),
    *unneeded("", "zero_force_ds_cpu_optimizer",
              "fused=True in the code selects torch's fused kernels, on the CPU or on a GPU (update.device)"),
]  # fmt: skip

SCHEDULER: list[Key] = [
    translated("scheduler.type", "LambdaLR with DeepSpeed's formula, or torch.optim.lr_scheduler.X",
               f"{_RATE}; infinity supports all PyTorch schedulers", "text"),
    translated("scheduler.params.warmup_min_lr", "LOW", _RATE, "number", auto="0.0"),
    translated("scheduler.params.warmup_max_lr", "HIGH", _RATE, "number", auto="args.learning_rate"),
    translated("scheduler.params.warmup_num_steps", "WARMUP", _RATE, "count",
               auto="args.get_warmup_steps(total_steps)"),
    translated("scheduler.params.warmup_type", "the formula", _RATE, "text"),
    translated("scheduler.params.total_num_steps", "TOTAL", _RATE, "count", auto="total_steps"),
    translated("scheduler.params.warmup_min_ratio", "LOW", _RATE, "number"),
    translated("scheduler.params.cos_min_ratio", "END", _RATE, "number"),
    *lacking("scheduler.params", "cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size cycle_second_step_size "
             "cycle_first_stair_count cycle_second_stair_count decay_step_size cycle_momentum cycle_min_mom "
             "cycle_max_mom decay_mom_rate lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate "
             "lr_range_test_staircase", "specific to OneCycle and LRRangeTest", "see scheduler.type", off=()),
    *unneeded("scheduler.params", "last_batch_iteration",
              'optimizer.save_checkpoint(extra={"scheduler": scheduler.state_dict()}) saves the progress'),
]  # fmt: skip

PRECISION: list[Key] = [
    *(key for section in ("bf16", "bfloat16") for key in (
        translated(f"{section}.enabled", "MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
                   "weights in bf16, master weights and moments in fp32, as in DeepSpeed", "flag", auto="args.bf16"),
        *unneeded(section, "immediate_grad_update", "gradients are used as soon as they are reduced"),
        *unneeded(section, "check_grad_overflow check_overflow",
                  "optimizer.clip_grad_norm_ skips a step whose norm is not finite"),
        *lacking(section, "bf16_master_weights_and_grads", "the master weights are fp32", 'state.format = "split": '
                 "weight and master weight share their bits, so that no bit is stored twice", changes=True),
        *lacking(section, "bf16_optimizer_states", "moments are fp32", 'state.format = "bf16-moments" stores them in '
                 "16 bits with stochastic rounding", changes=True),
    )),
    *lacking("fp16", "enabled", _FP16, _BF16_ONLY, takes="flag", changes=True),
    *lacking("fp16", "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
             "min_loss_scale auto_cast fp16_master_weights_and_grads", "depends on fp16.enabled", _BF16_ONLY, off=()),
    *lacking("", "amp", "uses NVIDIA Apex, which modifies the model and the optimizer", "bf16.enabled",
             switch="enabled", changes=True),
    translated("torch_autocast.enabled", "with torch.autocast(...)", "around your forward pass, as without infinity",
               "flag"),
    translated("torch_autocast.dtype", "with torch.autocast(...)", "dtype of the autocast", "text"),
    *unneeded("torch_autocast", "lower_precision_safe_modules", "torch.autocast chooses the dtype for each operation"),
    translated("communication_data_type", "MixedPrecisionPolicy(reduce_dtype=...)",
               "dtype of the gradient reduction; the default is fp32", "text"),
    *unneeded("", "allreduce_always_fp32 fp32_allreduce", "gradients are reduced in fp32"),
    *unneeded("", "prescale_gradients gradient_predivide_factor",
              "it keeps fp16 sums in range; here gradients are reduced in fp32"),
    *lacking("", "gradient_allreduce_op", "FSDP2 averages gradients across ranks",
             "multiply the loss by the number of ranks", off=("mean",), takes="text", changes=True),
    *lacking("data_types", "grad_accum_dtype", "gradients are kept in fp32",
             "remove it; fp32 is more precise", off=("fp32",)),
    *lacking("data_types", "param_dtype buffer_dtype", "the model's own dtypes apply",
             "model.to(dtype) before fully_shard; MixedPrecisionPolicy", off=("fp32",)),
]  # fmt: skip

# Placement and transfer of state: `zero_optimization`, `aio`, activation checkpointing #

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

# Logging, profiling, checkpoints, and other training methods #

_PARALLEL = "infinity shards over one data-parallel mesh"

AROUND: list[Key] = [
    *unneeded("", "steps_per_print wall_clock_breakdown memory_breakdown timers dump_state log_level",
              "optimizer.records contains the times and bytes of every step; print them in your loop",
              "optimizer.records"),
    *unneeded("", "flops_profiler comms_logger", "telemetry.timeline shows transfers, all-gathers and stalls",
              "telemetry.timeline"),
    *unneeded("", "tensorboard wandb comet csv_monitor monitor_config", "log from your loop; losses that you report "
              "become infinityd metrics", "optimizer.report(loss=..., tokens=...)"),
    *unneeded("", "autotuning", "it searches DeepSpeed's settings; `infinity tune` searches infinity's, and `infinity "
              "probe` measures drives", "infinity tune"),
    *unneeded("checkpoint", "load_universal", "infinity's checkpoints can be loaded on any number of ranks; of a "
              "DeepSpeed checkpoint, only the weights can be imported", "optimizer.save_checkpoint()"),
    *unneeded("checkpoint", "tag_validation use_node_local_storage parallel_write writer",
              "checkpoints are written atomically and can be loaded on any number of ranks",
              "optimizer.save_checkpoint()"),
    *unneeded("", "nebula datastates_ckpt", "a checkpoint copies no data, so no background copy is needed",
              "optimizer.save_checkpoint()"),
    *unneeded("", "disable_allgather", "only used by old DeepSpeed versions"),
    *unneeded("", "sparse_gradients", "gradients are dense; values are the same"),
    *lacking("", "compile graph_harvesting", "DeepSpeed's own compiler", "torch.compile(layer) before "
             "fully_shard", switch="any"),
    *lacking("", "sparse_attention", "uses DeepSpeed's attention implementation; attention is part of your model",
             "sparse attention in your model, for example with torch's flex_attention", switch="any", changes=True),
    *lacking("", "compression_training quantize_training weight_quantization", "infinity does not modify weights "
             "during training", "prune or quantize the output of `infinity export`", switch="nested", changes=True),
    *lacking("", "data_efficiency curriculum_learning", "DeepSpeed's engine selects and truncates batches; here your "
             "DataLoader does", "implement it in your dataset or sampler", switch="nested", changes=True),
    *lacking("", "progressive_layer_drop", "DeepSpeed's engine drops layers; here your model does",
             "implement it in the model's forward", switch="enabled", changes=True),
    *lacking("", "eigenvalue", "specific to quantized training", "remove it", switch="enabled"),
    *lacking("", "elasticity", "DeepSpeed computes batch sizes from it", "fix train_batch_size; `torchrun --nnodes "
             "MIN:MAX` restarts, and run.resume = \"auto\" resumes on a different number of ranks", switch="enabled",
             changes=True),
    *lacking("", "pipeline", f"{_PARALLEL}, without pipelines", "apply fully_shard to the whole model; no pipeline "
             "stages are needed to save memory", switch="any", changes=True),
    *lacking("", "tensor_parallel", f"{_PARALLEL}; DeepSpeed's AutoTP is not supported", "apply fully_shard to the "
             "whole model", switch="any", changes=True),
    *lacking("", "expert_parallel", f"{_PARALLEL}; experts are not distributed across ranks", "apply fully_shard to "
             "the whole model", switch="enabled", changes=True),
    *lacking("", "use_data_before_expert_parallelism seq_parallel_communication_data_type", f"{_PARALLEL}; experts and "
             "sequences are not distributed across ranks", "remove it", off=(False, "fp32")),
    *lacking("", "hybrid_engine", "it generates text between steps with DeepSpeed's inference kernels",
             "model.generate on the offloaded model, or `infinity export` and an inference server", switch="enabled",
             changes=True),
]  # fmt: skip

TABLE = Table([*BATCHES, *OPTIMIZER, *SCHEDULER, *PRECISION, *ZERO, *OFFLOAD, *AIO, *ACTIVATIONS, *AROUND])
