"""Keys for logging, profiling, checkpoints, and other training methods."""

from __future__ import annotations

from infinity_tools.migrate.keys import Key, Table, lacking, unneeded
from infinity_tools.migrate.keys_training import BATCHES, OPTIMIZER, PRECISION, SCHEDULER
from infinity_tools.migrate.keys_zero import ACTIVATIONS, AIO, OFFLOAD, ZERO

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
