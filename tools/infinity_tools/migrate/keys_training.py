"""Keys for the training itself: batches, optimizer, scheduler, precision."""

from __future__ import annotations

from infinity_tools.migrate.keys import Key, lacking, translated, unneeded

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
