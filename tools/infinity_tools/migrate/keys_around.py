"""Keys about what is around training: logs, profilers, checkpoints; and of other ways to train."""

from __future__ import annotations

from infinity_tools.migrate.keys import Key, Table, lacking, unneeded
from infinity_tools.migrate.keys_training import BATCHES, OPTIMIZER, PRECISION, SCHEDULER
from infinity_tools.migrate.keys_zero import ACTIVATIONS, AIO, OFFLOAD, ZERO

_PARALLEL = "infinity shards over one mesh of data parallelism"

AROUND: list[Key] = [
    *unneeded("", "steps_per_print wall_clock_breakdown memory_breakdown timers dump_state log_level",
              "optimizer.records has times and bytes of every step; your loop prints what it likes",
              "optimizer.records"),
    *unneeded("", "flops_profiler comms_logger", "telemetry.timeline shows what was moved, gathered and waited for",
              "telemetry.timeline"),
    *unneeded("", "tensorboard wandb comet csv_monitor monitor_config", "your loop logs; losses that it reports are "
              "metrics of infinityd", "optimizer.report(loss=..., tokens=...)"),
    *unneeded("", "autotuning", "it searches DeepSpeed's own settings; `infinity tune` finds infinity's, and `infinity "
              "probe` measures drives", "infinity tune"),
    *unneeded("checkpoint", "tag_validation load_universal use_node_local_storage parallel_write writer",
              "a checkpoint is one folder per path, is complete or absent, and loads on any number of ranks",
              "optimizer.save_checkpoint()"),
    *unneeded("", "nebula datastates_ckpt", "a checkpoint copies nothing, so there is nothing to do in the background",
              "optimizer.save_checkpoint()"),
    *unneeded("", "disable_allgather", "of DeepSpeed's old versions"),
    *unneeded("", "sparse_gradients", "gradients are dense; values are the same"),
    *lacking("", "compile graph_harvesting", "it is DeepSpeed's own compiler", "torch.compile(layer) before "
             "fully_shard", switch="any"),
    *lacking("", "sparse_attention", "it is DeepSpeed's own attention, part of the model",
             "an attention of your model, such as torch's flex_attention", switch="any", changes=True),
    *lacking("", "compression_training quantize_training weight_quantization", "nothing here changes weights while "
             "they are trained", "prune or quantise what `infinity export` writes", switch="nested", changes=True),
    *lacking("", "data_efficiency curriculum_learning", "the engine of DeepSpeed chooses and cuts batches; here your "
             "DataLoader does", "do it in your dataset or sampler", switch="nested", changes=True),
    *lacking("", "progressive_layer_drop", "the engine of DeepSpeed drops layers; here your model does",
             "do it in the model's forward", switch="enabled", changes=True),
    *lacking("", "eigenvalue", "of quantised training", "leave it out", switch="enabled"),
    *lacking("", "elasticity", "DeepSpeed computes batch sizes from it", "fix train_batch_size; `torchrun --nnodes "
             "MIN:MAX` restarts, and run.resume = \"auto\" goes on with another number of ranks", switch="enabled",
             changes=True),
    *lacking("", "pipeline", f"{_PARALLEL}; no pipelines", "fully_shard the whole model: memory is no reason "
             "for stages", switch="any", changes=True),
    *lacking("", "tensor_parallel", f"{_PARALLEL}; layers are not split by DeepSpeed's AutoTP", "fully_shard the whole "
             "model", switch="any", changes=True),
    *lacking("", "expert_parallel", f"{_PARALLEL}; experts are not placed on ranks", "fully_shard the whole model",
             switch="enabled", changes=True),
    *lacking("", "use_data_before_expert_parallelism seq_parallel_communication_data_type", f"{_PARALLEL}; no experts "
             "or sequences are spread over ranks", "leave it out", off=(False, "fp32")),
    *lacking("", "hybrid_engine", "it generates text between steps with DeepSpeed's inference kernels",
             "model.generate on the offloaded model, or `infinity export` and a server", switch="enabled",
             changes=True),
]  # fmt: skip

GROUPS: dict[str, list[Key]] = {
    "Batches": BATCHES,
    "Optimizer": OPTIMIZER,
    "Scheduler": SCHEDULER,
    "Precision": PRECISION,
    "ZeRO": ZERO,
    "Offloading": OFFLOAD,
    "Asynchronous I/O": AIO,
    "Activation checkpointing": ACTIVATIONS,
    "Around training": AROUND,
}
"""The keys by what they are about, as docs/how-to/migrate.md shows them."""

TABLE = Table([key for group in GROUPS.values() for key in group])
