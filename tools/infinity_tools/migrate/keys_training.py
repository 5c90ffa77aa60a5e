"""Keys about the training itself: batches, optimizer, scheduler, precision."""

from __future__ import annotations

from infinity_tools.migrate.keys import Key, lacking, translated, unneeded

_BATCH = "a batch of a rank has the sequences of all its micro-batches, and is sliced in the model"
_FP16 = "float16 needs its loss scaled, as DeepSpeed does by itself; infinity scales none, and is not tested in it"
_BF16_ONLY = "train in bf16, whose range is that of fp32 (bf16.enabled), or scale the loss with torch.amp.GradScaler"
_RATE = "the rate is that of DeepSpeed's at every step"
_CALL = "passed to the optimizer"
_CLASS = "passed to the optimizer, if its class takes it"

BATCHES: list[Key] = [
    translated("train_batch_size", "your DataLoader's batch_size, and infinity.micro_batches(model, n)", _BATCH,
               "count",
               auto="args.world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps"),
    translated("train_micro_batch_size_per_gpu", "your DataLoader's batch_size", _BATCH, "count",
               auto="args.per_device_train_batch_size"),
    translated("gradient_accumulation_steps", "infinity.micro_batches(model, n)",
               "each layer runs all micro-batches before the next one starts, so more of them read no more weights",
               "count", auto="args.gradient_accumulation_steps"),
    *unneeded("", "managed_gradient_accumulation", "your loop says where a step ends"),
    translated("gradient_clipping", "optimizer.clip_grad_norm_(x)",
               "the same norm, exact over all ranks; updates then wait for the next forward (update.schedule)",
               "number", auto="args.max_grad_norm"),
    *lacking("", "dataloader_drop_last", "your loop makes its DataLoader itself", "DataLoader(drop_last=True)"),
]  # fmt: skip

OPTIMIZER: list[Key] = [
    translated("optimizer.type", "torch.optim.X(model.parameters(), ...)",
               "Adam is AdamW unless adam_w_mode is false, as in DeepSpeed; what torch lacks is refused", "text"),
    *unneeded("optimizer", "legacy_fusion", "of DeepSpeed's own optimizers in fp16"),
    translated("optimizer.params.lr", "lr=", _CALL, "number", auto="args.learning_rate"),
    translated("optimizer.params.betas", "betas=", _CALL, "pair", auto="(args.adam_beta1, args.adam_beta2)"),
    translated("optimizer.params.eps", "eps=", _CALL, "number", auto="args.adam_epsilon"),
    translated("optimizer.params.weight_decay", "weight_decay=",
               "passed to the optimizer; where it is missing, DeepSpeed's default of 0, which AdamW of torch has not",
               "number", auto="args.weight_decay"),
    translated("optimizer.params.momentum", "momentum=", _CLASS, "number"),
    translated("optimizer.params.dampening", "dampening=", _CLASS, "number"),
    translated("optimizer.params.nesterov", "nesterov=", _CLASS, "flag"),
    translated("optimizer.params.amsgrad", "amsgrad=", _CLASS, "flag"),
    translated("optimizer.params.alpha", "alpha=", _CLASS, "number"),
    translated("optimizer.params.centered", "centered=", _CLASS, "flag"),
    translated("optimizer.params.lr_decay", "lr_decay=", _CLASS, "number"),
    translated("optimizer.params.adam_w_mode", "torch.optim.AdamW, or Adam",
               "whether weight decay is apart from the gradient", "flag"),
    *unneeded("optimizer.params", "torch_adam", "the optimizer is torch's in any case"),
    *unneeded("optimizer.params", "set_grad_none", "optimizer.zero_grad() drops gradients"),
    translated("optimizer.params.max_grad_norm", "optimizer.clip_grad_norm_(x)", "as gradient_clipping", "number"),
    *lacking("optimizer.params", "bias_correction", "torch's optimizers always correct the bias of moments",
             "leave it out", off=(True,), takes="flag", changes=True),
    *lacking("optimizer.params", "fp32_optimizer_states", "states are fp32",
             'state.format = "bf16-moments" stores them in 16 bits, rounded at random without bias', off=(True,)),
    *lacking("optimizer.params", "muon_lr adam_lr", "of Muon, whose two optimizers you make",
             "lr= of torch.optim.Muon, of torch.optim.AdamW", off=(), changes=True),
    *lacking("optimizer.params", "ns_method", "of Muon: torch's has one way to make a matrix orthogonal",
             "leave it out", off=("standard",), changes=True),
    *lacking("optimizer.params", "max_coeff min_coeff", "of LAMB, for which you take one of another package",
             "leave them out", off=(), changes=True),
    *lacking("optimizer.params", "freeze_step cuda_aware comm_backend_name coeff_beta factor_max factor_min "
             "factor_threshold var_freeze_step var_update_scaler local_step_scaler local_step_clipper",
             "of optimizers with compressed communication, which are refused", "AdamW", off=(), changes=True),
    *unneeded("", "zero_allow_untested_optimizer",
              "infinity.offload tries an optimizer when it gets it, and refuses one that cannot be cut into pages"),
    *unneeded("", "zero_force_ds_cpu_optimizer",
              "fused=True in the code: torch's own fused kernels, on the CPU or on a GPU (update.device)"),
]  # fmt: skip

SCHEDULER: list[Key] = [
    translated("scheduler.type", "LambdaLR with DeepSpeed's formula, or torch.optim.lr_scheduler.X",
               f"{_RATE}; infinity takes any scheduler of torch", "text"),
    translated("scheduler.params.warmup_min_lr", "LOW", _RATE, "number", auto="0.0"),
    translated("scheduler.params.warmup_max_lr", "HIGH", _RATE, "number", auto="args.learning_rate"),
    translated("scheduler.params.warmup_num_steps", "WARMUP", _RATE, "count",
               auto="args.get_warmup_steps(total_steps)"),
    translated("scheduler.params.warmup_type", "the formula", _RATE, "text"),
    translated("scheduler.params.total_num_steps", "TOTAL", _RATE, "count", auto="total_steps"),
    translated("scheduler.params.warmup_min_ratio", "LOW", _RATE, "number"),
    translated("scheduler.params.cos_min_ratio", "END", _RATE, "number"),
    *(translated(f"scheduler.params.{name}", "the formula", _RATE, takes) for name, takes in {
        "cycle_min_lr": "number", "cycle_max_lr": "number", "decay_lr_rate": "number", "cycle_first_step_size": "count",
        "cycle_second_step_size": "count", "cycle_first_stair_count": "count", "cycle_second_stair_count": "count",
        "decay_step_size": "count", "lr_range_test_min_lr": "number", "lr_range_test_step_size": "count",
        "lr_range_test_step_rate": "number", "lr_range_test_staircase": "flag",
    }.items()),
    *(translated(f"scheduler.params.{name}", 'group["betas"]',
                 "the scheduler of DeepSpeed sets the betas of Adam too; your loop does", takes) for name, takes in {
        "cycle_momentum": "flag", "cycle_min_mom": "number", "cycle_max_mom": "number", "decay_mom_rate": "number",
    }.items()),
    *unneeded("scheduler.params", "last_batch_iteration",
              'checkpoint(extra={"scheduler": scheduler.state_dict()}) keeps how far it is'),
]  # fmt: skip

PRECISION: list[Key] = [
    *(key for section in ("bf16", "bfloat16") for key in (
        translated(f"{section}.enabled", "MixedPrecisionPolicy(torch.bfloat16, torch.float32)",
                   "weights in bf16, master and moments in fp32, as in DeepSpeed", "flag", auto="args.bf16"),
        *unneeded(section, "immediate_grad_update", "gradients are used where they arrive"),
        *unneeded(section, "check_grad_overflow check_overflow",
                  "optimizer.clip_grad_norm_ skips a step whose norm is not finite"),
        *lacking(section, "bf16_master_weights_and_grads", "the master is fp32", 'state.format = "split": weight and '
                 "master share their bits, so that nothing is stored twice", changes=True),
        *lacking(section, "bf16_optimizer_states", "moments are fp32", 'state.format = "bf16-moments" stores them in '
                 "16 bits, rounded at random without bias", changes=True),
    )),
    *lacking("fp16", "enabled", _FP16, _BF16_ONLY, takes="flag", changes=True),
    *lacking("fp16", "loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
             "min_loss_scale auto_cast fp16_master_weights_and_grads", "it goes with fp16.enabled", _BF16_ONLY, off=()),
    *lacking("", "amp", "it is NVIDIA Apex, which changes model and optimizer", "bf16.enabled", switch="enabled",
             changes=True),
    translated("torch_autocast.enabled", "with torch.autocast(...)", "around your forward, as in memory", "flag"),
    translated("torch_autocast.dtype", "with torch.autocast(...)", "its dtype", "text"),
    *unneeded("torch_autocast", "lower_precision_safe_modules", "autocast of torch chooses by operation"),
    translated("communication_data_type", "MixedPrecisionPolicy(reduce_dtype=...)",
               "what gradients are reduced in; without it they are reduced in fp32", "text"),
    *unneeded("", "allreduce_always_fp32 fp32_allreduce", "gradients are reduced in fp32"),
    *unneeded("", "prescale_gradients gradient_predivide_factor",
              "it keeps sums of fp16 in range; gradients are reduced in fp32"),
    *lacking("", "gradient_allreduce_op", "FSDP2 averages over ranks",
             "multiply the loss by the number of ranks", off=("mean",), takes="text", changes=True),
    *lacking("data_types", "grad_accum_dtype", "gradients are kept in fp32",
             "leave it out: fp32 is the more exact of both", off=("fp32",)),
    *lacking("data_types", "param_dtype buffer_dtype", "the model's own dtypes hold",
             "model.to(dtype) before fully_shard; MixedPrecisionPolicy", off=("fp32",)),
]  # fmt: skip
