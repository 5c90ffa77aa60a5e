"""Tests of invalid input: one line on stderr with the value and the fix, status 2, and no files written."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

import infinity
from infinity.config import check_config, load_config
from infinity.errors import ConfigError
from infinity.run.run_directory import _say_where
from infinity_daemon.main import app as daemon
from support.command import SMALL, Finished, run_here, run_ranks

RUN = "20260101-000000-aaaaaa"


class Wrong(NamedTuple):
    """Command line that must be rejected, and texts that the error must contain."""

    words: tuple[str, ...]
    says: tuple[str, ...]


def after(*begin: str) -> Callable[..., Wrong]:
    """Return a function that appends words to a command line; ``''`` is an empty word and `~` a space within a word."""

    def row(line: str, *says: str) -> Wrong:
        rest = ("" if word == "''" else word.replace("~", " ") for word in line.split(" "))
        return Wrong((*begin, *rest), says)

    return row


TRAIN = (*SMALL, "--max_steps", "1", "--out", "o")
SMALL_TUNE = (
    "tune", "--model", "tiny", "--seq", "32", "--batch-tokens", "128", "--host-memory", "1MiB", "--threads", "1",
    "--nvme", "d", "--out", "o",
)  # fmt: skip
PLAN = "plan --parameters 3e8 --layers 8 --hidden 512 --vocabulary 1000 --nvme-bandwidth 1e9/1e9 --gpu h100"
wrong, train, tune, plan = after(), after(*TRAIN), after(*SMALL_TUNE, "--minutes", "0.1"), after(*PLAN.split())


def toml(text: str, *says: str) -> Wrong:
    """Return an `infinity train` command line with this settings file."""
    return Wrong((*TRAIN, "--config", f"TOML:{text}"), says)


def model(content: str | dict[str, object], *says: str) -> Wrong:
    """Return an `infinity train` command line with this config.json."""
    text = content if isinstance(content, str) else json.dumps(content)
    return Wrong((*TRAIN, "--model", f"JSON:{text}"), says)


def deepspeed(text: str, *says: str, words: tuple[str, ...] = ()) -> Wrong:
    """Return an `infinity migrate` command line with this file."""
    return Wrong(("migrate", f"JSON:{text}", *words), says)


def llama(**values: object) -> dict[str, object]:
    """Return the configuration of a small Llama model, with some values replaced."""
    return {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "max_position_embeddings": 64, **values,
    }  # fmt: skip


NAMES = [
    wrong("trian", "No such command 'trian'", "train"),
    wrong("top now", "now", "infinity top -h"),
    wrong("top --intervall 2", "--intervall", "--interval"),
    wrong("store lss .", "lss", "Did you mean 'ls'"),
    wrong("export", "Missing argument", "infinity export -h"),
    wrong("probe", "no folder given; pass a folder on each drive, or --interconnect"),
    wrong("probe --interconnect drive", "folder 'drive' cannot be combined with --interconnect"),
    wrong("probe --interconnect --sustained", "--sustained cannot be combined with --interconnect"),
    wrong("store ls", "Missing argument", "infinity store ls -h"),
    train("--max_stepz 4", "--max_stepz", "--max_steps"),
    train("--batch-tokens 4", "--batch_tokens", "--per_device_train_batch_size"),
    train("more", "'more'", "cannot be read"),
    train("--config", "--config", "argument"),
    train("--model tinny", "'tinny'", "did you mean tiny?"),
    train("--model https://huggingface.co/gpt2", "not a preset", "tiny"),
    train("--bf16 maybe", "bf16", "maybe"),
    train("--offload.storage.engine iouring", "'iouring'", "did you mean io_uring?"),
    train("--offload.update.schedule inbackward", "'inbackward'", "did you mean in_backward?"),
    train("--offload.state.format fp16", "'fp16'", "'split'"),
    train("--save_strategy never", "'never'"),
    wrong("export c --out x --to gguf", "'gguf'", "safetensors, dcp"),
    wrong("export c --out x --dtype fp64", "'fp64'", "loaded, trained, fp32, bf16, fp16"),
    wrong("export c --out x --run latest", "latest", "runs with a checkpoint"),
    wrong(f"export c --out x --run {RUN}", RUN, "runs with a checkpoint"),
    wrong("export c --out x --step 7", "no complete checkpoint of step 7", "2"),
    wrong(f"store verify c --run {RUN}", RUN, "runs:"),
    wrong("store rm c nothing", "nothing"),
    wrong(f"store rm c {RUN} --yes", RUN, "runs:"),
    wrong("store rm c", "--ended"),
    wrong(f"store rm {RUN}", "no folders"),
    wrong("doctor --josn", "--josn", "--json"),
    wrong("doctor d --runtime-dir", "--runtime-dir", "argument"),
    wrong("probe d --engine uring", "'uring'", "did you mean io_uring?"),
]
NUMBERS = [
    *(wrong(f"top --once --interval {value}", "--interval", f"'{value}'") for value in ("0", "-1", "x", "nan", "4000")),
    *(train(f"--{name} {value}", name, f"'{value}'")
      for name, values in {
          "max_steps": "1.5 x nan 1e3",
          "per_device_train_batch_size": "many 0x10",
          "max_length": "long",
          "learning_rate": "fast",
          "weight_decay": "some",
          "save_steps": "often",
          "metrics-port": "-1 65536 http",
          "host-memory": "-1 lots 1XB nan 1.2.3GiB 99999999999TiB",
      }.items() for value in values.split()),
    *(train(f"--{name} {value}", says)
      for name, value, says in [
          ("max_length", "0", "max_length"), ("learning_rate", "nan", "learning rate"),
          ("learning_rate", "-1", "learning rate"), ("per_device_train_batch_size", "0", "batch_size"),
          ("offload.run.seed", "-1", "run.seed = -1"), ("offload.memory.page_bytes", "64kb/s", "'64kb/s'"),
      ]),
    *(wrong(f"probe d --size 1MiB --{name} {value}", f"--{name}", f"'{value}'")
      for name, values in {"seconds": "0 -1 nan inf x"}.items() for value in values.split()),
    wrong("probe d --size 64PiB", "--size", "'64PiB'"),
    wrong("probe d --size 999TiB", "free", "999 TiB"),
    wrong("probe d --block 1000", "block = 1000", "4096"),
    wrong("probe d --block 1MiB,x", "--block", "'x'"),
    wrong("probe d --depth 1,,2", "--depth '1,,2' "),
    wrong("probe d --depth 0", "depth = 0", "1 to 4096"),
    wrong("probe d --block 2GiB --size 4GiB --depth 1", "storage.request_bytes", "maximum"),
    *(wrong(f"probe d --size 1MiB --block 4KiB --depth 1 --sustained --sustained-seconds {value}",
            "--sustained-seconds", f"'{value}'") for value in ["0", "-1", "nan", "inf", "x", "1e9"]),
    *(wrong(f"probe d --size 1MiB --block 4KiB --depth 1 --sustained --sustained-bytes {value}", "--sustained-bytes",
            says) for value, says in {"0": "too small", "-1": "'-1'", "x": "'x'", "999TiB": "free"}.items()),
    wrong("store scrub c --rate 0", "--rate 0", "no limit"),
    wrong("store scrub c --rate 5MB/s", "--rate", "'5MB/s'"),
    wrong("export c --out x --file-size big", "--file-size", "'big'"),
    wrong("export c --out x --file-size 0", "--file-size 0 is"),
    wrong("export c --out x --step -1", "--step", "'-1'"),
    train("--max_length 8192", "8192", "4096 positions"),
]  # fmt: skip
TUNE = [
    *(tune(f"--{name} {value}", f"--{name}", f"'{value}'")
      for name, values in {
          "minutes": "0 -1 nan inf soon 1441",
          "repeats": "0 -1 1.5 x 101",
          "batch-tokens": "0 -512 many",
          "micro-tokens": "0 half",
          "loss-tokens": "0 half",
          "activations": "gpu",
          "seq": "0 1 long",
          "threads": "-1 100000 all",
          "host-memory": "-1 lots 1XB nan",
          "allow-format": "fp32 SPLIT",
          "dtype": "float32",
      }.items() for value in values.split()),
    tune("--model tinny", "'tinny'", "did you mean tiny?"),
    tune("--model ~", "--model"),
    tune("--max-grad-norm 0", "--max-grad-norm 0", "greater than 0"),
    tune("--max-grad-norm nan", "--max-grad-norm nan", "greater than 0"),
    tune("--batch-tokens 100", "100", "--seq 32", "try 96"),
    tune("--micro-tokens 48", "--micro-tokens 48", "possible: 32, 64, 128"),
    tune("--seq 8192 --batch-tokens 8192", "--seq 8192", "4096 positions"),
    tune("--nvme missing/deeper", "'missing/deeper'", "storage.paths"),
    tune("--nvme d", "same folder twice"),
    tune("--out file", "--out 'file'", "is not a folder"),
    tune("--config missing.toml", "missing.toml", "cannot be read"),
    tune("--json --host-memory 64KiB", "the host cache is too small"),  # without --json, the search is announced first
    tune("more", "more", "infinity tune -h"),
    wrong("tune --host-memory 2MiB", "--nvme is missing"),
    Wrong((*SMALL_TUNE, "--max-grad-norm", "1", "--config",
           "TOML:[update]\nschedule = 'in_backward'"), ("update.schedule", "--max-grad-norm")),
    Wrong((*SMALL_TUNE, "--config", "TOML:[storage]\nqueue_depth = 0"),
          ("storage.queue_depth = 0", "minimum of 1")),
]  # fmt: skip
EMPTY = [
    train(f"--{name} ''", f"--{name}", "empty")
    for name in ("model", "data", "out", "nvme", "config", "offload.state.format", "host-memory", "trace", "max_steps")
] + [
    wrong("top --run ''", "--run", "empty"),
    train("--out=", "--out", "empty"),
    wrong("store ls ''", "empty"),
    wrong("export c --out ''", "--out", "empty"),
    wrong("export '' --out o", "empty value after export"),
    wrong("probe d --size ''", "--size", "empty"),
    wrong("doctor ''", "doctor", "empty"),
]
PATHS = [
    train("--nvme missing/deeper", "'missing/deeper' cannot be created", "'missing' is not a folder"),
    train("--nvme file", "'file' is not a folder"),
    train("--nvme loop", "'loop' is not a folder"),
    train("--nvme d --nvme d", "same folder twice"),
    train("--nvme d --nvme link", "same folder twice"),
    train("--nvme d --nvme with~space/../d/", "same folder twice"),
    train("--out file/below", "file/below'", "Not a directory"),
    train("--out fifo", "fifo'", "File exists"),
    train("--out /proc/infinity", "'/proc/infinity'"),
    train("--data missing.jsonl", "'missing.jsonl'", "does not exist"),
    train("--data empty", "no text", "empty"),
    train("--data d", "no text"),
    train("--tokenizer d", "--tokenizer"),
    train("--config missing", "'missing'", "No such file"),
    train("--config fifo", "'fifo'", "not a regular file"),
    train("--config binary", "'binary'", "not valid TOML"),
    train("--config huge", "'huge'", "longer than"),
    train("--model d", "/d'", "config.json"),
    train("--model binary", "binary'"),
    train("--model /dev/null", "'/dev/null' is not a preset"),
    train("--resume", "'o/recipe.yaml' does not exist"),
    train("--resume d/checkpoint-2 --out d", "'d/recipe.yaml' does not exist"),
    train("--trace missing/t.json", "'missing' is not a folder"),
    train("--trace /dev/null", "it is a device or pipe"),
    train(
        "--metrics-host no-such-host.invalid --metrics-port 0 --data nowhere", "no-such-host.invalid", "another port"
    ),
    train(f"--metrics-host {'a' * 300} --metrics-port 0", "cannot be used"),
    wrong("store ls missing", "'missing'", "not a folder"),
    wrong("store gc missing", "'missing'", "No such file"),
    wrong(f"store rm missing {RUN}", "'missing'", "neither a folder"),
    wrong("export missing --out x", "'missing'", "not a folder"),
    wrong("export d --out x", "no checkpoint of any run in d"),
    wrong("export c --out file", "file"),
    wrong("export c --out c", "c"),
    wrong("export c --out x --model-config missing", "'missing'", "No such file"),
    wrong("export c --out x --model-config list.json", "'list.json'", "JSON object"),
    wrong("probe file", "'file'", "not a folder"),
    wrong("probe d --out file --size 1MiB --block 4KiB --depth 1 --seconds 0.001", "'file' is not a folder"),
    wrong("probe d --out file/deeper --size 1MiB --block 4KiB --depth 1 --seconds 0.001", "is not a folder"),
    wrong("probe d link --size 1MiB --block 4KiB --depth 1 --seconds 0.001", "same folder", "twice"),
    wrong("top --runtime-dir missing", "--runtime-dir", "'missing'", "telemetry.runtime_dir"),
    wrong("top --once --runtime-dir file", "--runtime-dir", "'file'", "not a folder"),
    wrong("top --json --interval 0.1 --runtime-dir d --run x", "--run 'x'", "runs: none"),
]
TOGETHER = [
    train("--offload.update.schedule in_backward --max_grad_norm 1", "in_backward", "in_forward"),
    train("--offload.memory.page_bytes 2MiB", "memory.host_bytes", "memory.page_bytes"),
    train("--offload.memory.page_bytes 100000", "100000", "65536"),
    train("--bf16 false --offload.state.format split", '"split"', '"fp32"'),
    train("--load_best_model_at_end", "save_strategy"),
    train("--fp16", "fp16"),
    train("--save_total_limit 0", "save_total_limit"),
    train("--quantize int8", "also pass --peft.r"),
    train("--push_to_hub", "hf upload"),
    train("--early_stopping_patience 2", "pass --eval_data"),
    wrong("export c --out x --to dcp --file-size 1GiB", "--file-size", "--to safetensors"),
    wrong("export c --out x --to dcp --merge", "--merge", "--to safetensors"),
    wrong("export c --out x --merge", "trains no adapters"),
    wrong("export c --out x --to dcp --dtype fp32", "--dtype", "--to safetensors"),
    wrong("store rm c --ended --json", "--yes"),
    wrong("store gc c waste --json", "waste"),
    wrong("probe d --sustained-bytes 1GiB", "--sustained-bytes 1GiB "),
    wrong("doctor d link", "'d' and 'link' are the same folder"),
    wrong("doctor d with~space/../d/ file", "'with space/../d/'", "once"),
    wrong("doctor d\0", "null byte"),
]
PLANS = [
    wrong("plan", "--model", "--parameters"),
    wrong("plan --model tiny --parameters 1e9", "--model and --parameters"),
    wrong("plan --model tiny --layers 4", "--layers", "--model 'tiny'"),
    wrong("plan --model tinny", "'tinny'", "did you mean tiny?"),
    wrong("plan --parameters 1e9 --layers 4", "--hidden and --vocabulary"),
    wrong(
        "plan --parameters 1e3 --layers 4 --hidden 512 --vocabulary 1000 --nvme-bandwidth 1e9/1e9 --gpu h100",
        "too few for 4 layers of width 512",
    ),
    plan("--ranks 100001", "--ranks '100001': 100001 is above", "100,000"),
    plan("--batch-tokens 1000000000001", "--batch-tokens", "is above", "1,000,000,000,000"),
    *(
        plan(f"--{name} {value}", f"--{name}", f"'{value}'")
        for name, values in {
            "parameters": "0 -1 nan many 70B",
            "layers": "0 -1 1.5 x",
            "hidden": "0 x",
            "vocabulary": "0 x",
            "lora": "0 x",
            "trainable": "-1 2 nan x",
            "batch-tokens": "0 -5 x",
            "seq": "0 1 x",
            "micro-batches": "0 x",
            "ranks": "0 -1 x",
            "nodes": "0 x",
            "tflops": "0 -1 nan inf fast",
            "nvme-count": "0 x",
            "update-cores": "x 1.5",
            "retained-checkpoints": "-1 x",
        }.items()
        for value in values.split()
    ),
    plan("--dtype fp16", "'fp16'", "bf16, fp32"),
    plan("--optimizer adamv", "'adamv'", "did you mean adam"),
    plan("--gpu h10", "'h10'", "did you mean h100?"),
    plan("--dtype fp32", "--tflops"),
    plan("--link fast", "--link", "'fast'"),
    plan("--link 5", "--link '5'", "1e3", "55e9"),
    plan("--gpu-memory lots", "--gpu-memory", "'lots'"),
    plan("--nvme-bandwidth 7e9", "'7e9'", "7e9/5e9"),
    plan("--nvme-bandwidth fast/5e9", "'fast'", "7GB"),
    plan("--nvme-bandwidth 7/5", "'7'", "1e6"),
    plan("--nvme-size big", "--nvme-size", "'big'"),
    plan("--nvme d", "--nvme and --nvme-bandwidth"),
    wrong("plan --model tiny --nvme missing --tflops 1", "'missing'", "not a folder"),
    wrong("plan --model tiny --nvme d --nvme d --tflops 1", "same folder twice"),
    wrong("plan --model tiny --nvme d --nvme-count 2 --tflops 1", "--nvme-count 2", "--nvme-bandwidth"),
    wrong("plan --model tiny --nvme d --link 5e9", "--link 5e9", "--gpu"),
    wrong("plan --model tiny --nvme d --cores 4", "--cores 4", "--gpu"),
    plan("--lora 8 --trainable 0.5", "--lora and --trainable"),
    plan("--lora r=8,targets=none", "'none'", "q_proj"),
    plan("--loop", "--micro-batches"),
    plan("--batch-tokens 512 --seq 1024", "--seq 1024", "512 tokens"),
    plan("--batch-tokens 512 --seq 256 --micro-batches 3", "--micro-batches 3", "2 sequences"),
    plan("--batch-tokens 8 --ranks 8", "--batch-tokens 8", "8 ranks"),
    plan("--state-format fp16", "'fp16'", "'split'"),
    plan("--clip --update in_backward", "in_backward", "clipping"),
    plan("--config nothing.toml", "nothing.toml"),
    plan("--out file", "'file' is not a folder"),
    plan("--nodes 2 --interconnect absent.json", "cannot be read: No such file or directory"),
    Wrong(
        (*PLAN.split(), "--nodes", "2", "--interconnect", 'JSON:{"nodes": 2}'),
        ("is not a result of `infinity probe --interconnect`",),
    ),
    plan("more", "more", "infinity plan -h"),
]
SETTINGS = [
    toml("[memory]\nhost_byte = 1", "memory.host_byte", "did you mean memory.host_bytes?"),
    toml("[memry]\nhost_bytes = 1", "memry", "did you mean memory?"),
    toml("host_bytes = '1GiB'", "host_bytes", "did you mean memory.host_bytes?"),
    toml("paths = ['d']", "paths", "did you mean storage.paths?"),
    toml("[storage]\nhost_bytes = 1", "storage.host_bytes", "did you mean memory.host_bytes?"),
    toml("lr = 1", "lr", "storage, memory"),
    toml("memory = 4", "memory = 4", "host_bytes"),
    toml("[memory.host_bytes]\nx = 1", "memory.host_bytes", "size"),
    toml("[memory]\nhost_bytes = 1.5", "1.5", "size"),
    toml("[memory]\nhost_bytes = -1", "-1", "negative"),
    toml("[memory]\nhost_bytes = true", "memory.host_bytes", "True is not a size"),
    toml("[memory]\nhost_bytes = '3 parsecs'", "memory.host_bytes", "'3 parsecs'"),
    toml("[storage]\nbandwidth_weight = 0", "storage.bandwidth_weight = 0", "minimum of 1"),
    toml("[memory]\nhost_bytes = 9223372036854775808", "9223372036854775808", "2^63 - 1 bytes"),
    toml("[storage]\npaths = 'd'", "storage.paths = 'd'", "list of strings"),
    toml("[storage]\npaths = ['d', 'd']", "twice"),
    toml('[storage]\npaths = ["d\\u0000"]', "zero byte"),
    toml('[storage]\npaths = ["missing/a\\nb"]', "missing/a\\nb' cannot be created"),
    toml("[storage]\nqueue_depth = 0", "storage.queue_depth = 0", "minimum of 1"),
    toml("[storage]\nqueue_depth = 100000", "100000", "maximum of 4096"),
    toml("[storage]\nqueue_depth = nan", "nan", "integer"),
    toml("[storage]\nqueue_depth = '32'", "'32'", "integer"),
    toml("[storage]\nrequest_bytes = 5000", "5000", "4096"),
    toml("[storage]\nrequest_bytes = '4TiB'", "maximum"),
    toml("[storage]\nretries = -1", "storage.retries = -1", "minimum of 0"),
    toml("[storage]\nengine = ['threads']", "['threads']", "'threads'"),
    toml("[update]\nschedule = 'backward'", "'backward'", "in_backward"),
    toml("[update]\ncores = -2", "update.cores = -2", "minimum of -1"),
    toml("[run]\nseed = 99999999999999999999", "run.seed", "maximum"),
    toml("[run]\nresume = true", "run.resume = True", "a string"),
    toml("[run]\nresume_paths = ['c']", "run.resume_paths", "run.resume"),
    toml("[run]\nresume_step = 100", "run.resume_step = 100", "run.resume"),
    toml("[run]\nkeep = 'yes'", "'yes'", "'always'"),
    toml("[memory]\nhost_bytes = 1\nhost_bytes = 2", "not valid TOML"),
    toml("x = " + "[" * 5000, "not valid TOML"),
    toml("x = " + "9" * 5000, "not valid TOML"),
]
MODELS = [
    model("", "config.json"),
    model("{", "config.json"),
    model("{}", "model_type"),
    model({"model_type": "no-such-model"}, "no-such-model"),
    model({"model_type": 5}, "config.json"),
    model({"model_type": "vit"}, "vocab_size"),
    model(llama(hidden_size=-1)),
    model(llama(hidden_size="wide"), "wide"),
    model(llama(num_hidden_layers=-1), "num_hidden_layers = -1"),
    model(llama(num_attention_heads=5)),
    model(llama(vocab_size=-5, bos_token_id=None, eos_token_id=None), "vocab_size = -5"),
    model(llama(vocab_size=100), "token ids up to 255", "only 100", "--tokenizer"),
    model(llama(max_position_embeddings=8), "--max_length 32", "8 positions"),
    model(llama(hidden_act="sinus"), "sinus"),
    # --json hides a warning of transformers about the same value
    Wrong((*model(llama(rope_scaling={"type": "nonsense"})).words, "--json"), ("AutoModelForCausalLM", "nonsense")),
]

DEEPSPEED = [
    wrong("migrate", "Missing argument", "infinity migrate -h"),
    wrong("migrate ''", "empty"),
    wrong("migrate missing", "'missing'", "No such file"),
    wrong("migrate fifo", "'fifo'", "not a regular file"),
    wrong("migrate binary", "'binary'", "UTF-8"),
    wrong("migrate huge", "'huge'", "longer than"),
    wrong("migrate empty", "'empty'", "not JSON"),
    wrong("migrate list.json --force", "--force requires --out"),
    wrong("migrate list.json --out file", "'file'", "--force"),
    wrong("migrate list.json --out d", "'d'", "--force"),
    wrong("migrate list.json --out=", "--out", "empty"),
    wrong("migrate list.json --nvme ''", "--nvme", "empty"),
    deepspeed("{", "not JSON", "line 1"),
    deepspeed("{}", "known keys"),
    deepspeed('{"model_type": "llama"}', "known keys", "ds_config.json"),
    deepspeed('{"bf16": {"enabled": true},}', "comma", "remove"),
    deepspeed('{// ZeRO\n"bf16": {}}', "comments", "remove"),
    deepspeed('{"bf16": {}, # ZeRO\n"aio": {}}', "line 1", "comments"),
    deepspeed('{"bf16": {}, "bf16": {}}', "'bf16'", "twice"),
    deepspeed('{"aio": {"queue_depth": 1, "queue_depth": 2}}', "'queue_depth'", "twice"),
    deepspeed('{"aio": NaN}', "NaN"),
    deepspeed('{"gradient_clipping": 1e999}', "1e999"),
    deepspeed('{"aio": ' + "[" * 5000, "nested"),
    deepspeed('{"tensorboard": "\\ud800"}', "ud800"),
    deepspeed('{"zero_optimization": 3}', "zero_optimization = 3", "object"),
    deepspeed('{"zero_optimization": {"stage": 5}}', "zero_optimization.stage = 5", "maximum of 3"),
    deepspeed('{"zero_optimization": {"offload_param": {"device": "disk"}}}', "'disk'", "'none', 'cpu', 'nvme'"),
    deepspeed('{"zero_optimization": {"offload_param": {"nvme_path": " "}}}', "nvme_path = ' '", "path"),
    deepspeed('{"zero_optimization": {"offload_param": {"nvme_path": "a\\u0000"}}}', "zero byte"),
    deepspeed('{"zero_optimization": {"offload_param": {"max_in_cpu": -1}}}', "max_in_cpu = -1", "integer"),
    deepspeed('{"aio": {"queue_depth": true}}', "aio.queue_depth = True", "integer"),
    deepspeed('{"gradient_clipping": "1"}', "gradient_clipping = '1'", "number"),
    deepspeed('{"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}', "optimizer.params.betas", "two numbers"),
    deepspeed('{"optimizer": {"type": "Adam", "params": [1]}}', "optimizer.params", "object"),
    deepspeed('{"bf16": {"enabled": "yes"}}', "bf16.enabled = 'yes'", "true or false"),
    deepspeed('{"scheduler": {"type": "StepLR", "params": {"a b": 1}}}', "'a b'", "argument"),
    deepspeed('{"bf16": {}}', "--out 'missing/x'", words=("--out", "missing/x")),
    deepspeed('{"bf16": {}}', "--out 'd'", words=("--out", "d", "--force")),
]


@pytest.fixture(scope="module")
def world(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with unusual entries, and the folder of a run with checkpoints as `c`."""
    place = tmp_path_factory.mktemp("world")
    for name in ("d", "tmp", "with space"):
        (place / name).mkdir()
    (place / "file").write_text("x\n" * 1000)
    (place / "empty").touch()
    (place / "binary").write_bytes(bytes(range(256)) * 8)
    (place / "list.json").write_text("[1]")
    with open(place / "huge", "wb") as file:
        file.truncate(64 << 20)
    os.mkfifo(place / "fifo")
    (place / "nowhere").symlink_to("gone")
    (place / "loop").symlink_to("loop")
    (place / "link").symlink_to("d")
    shutil.copytree(trained / "nvme", place / "c")
    return place


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of every file, except for stats files and the lock files of folders."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, 0 if path.is_dir() else path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] != "tmp" and not path.name.startswith("infinity.")
    }


def error_lines(done: Finished) -> list[str]:
    """Return the lines of stderr that do not show progress."""
    progress = ("loading ", "preparing ", "writing ", "metrics: ")
    return [line for line in done.errors.splitlines() if line and not line.startswith(progress)]


@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize(
    "table",
    [NAMES, NUMBERS, EMPTY, PATHS, TOGETHER, SETTINGS, MODELS, DEEPSPEED, PLANS, TUNE],
    ids=["names", "numbers", "empty", "paths", "together", "settings", "models", "deepspeed", "plans", "tune"],
)
def test_invalid_command_prints_one_line_error(
    table: list[Wrong], subtests: pytest.Subtests, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is 2, and no file is changed."""
    monkeypatch.chdir(world)
    before = snapshot(world)
    for case in table:
        words = []
        for word in case.words:
            kind, _, text = word.partition(":")
            if kind in ("TOML", "JSON"):
                word = str(tmp_path / f"settings.{kind.lower()}")
                Path(word).write_text(text)
            words.append(word)
        with subtests.test(" ".join(case.words)):
            done = run_here(*words)
            lines = error_lines(done)
            assert done.status == 2, (done.status, done.errors, done.output)
            assert len(lines) == 1, done.errors
            assert lines[0].startswith("error: ")
            assert all(text in lines[0] for text in case.says), lines[0]
            assert not done.output
            assert snapshot(world) == before


LAUNCHED = {
    "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # fmt: skip
ENVIRONMENTS: list[tuple[dict[str, str | None], tuple[str, ...]]] = [
    ({"RANK": "x"}, ("RANK='x'", "torchrun")),
    ({"RANK": "-1"}, ("RANK='-1'", "torchrun")),
    ({"RANK": ""}, ("RANK", "torchrun")),
    ({"RANK": "2"}, ("RANK=2", "WORLD_SIZE=2")),
    ({"RANK": None}, ("WORLD_SIZE=2", "RANK is not set")),
    ({"WORLD_SIZE": "two"}, ("WORLD_SIZE='two'", "unset")),
    ({"WORLD_SIZE": "1e9"}, ("WORLD_SIZE='1e9'", "unset")),
    ({"WORLD_SIZE": "9" * 20}, ("WORLD_SIZE", "unset")),
    ({"WORLD_SIZE": None}, ("WORLD_SIZE", "torchrun")),
    ({"LOCAL_RANK": "0.5"}, ("LOCAL_RANK='0.5'", "unset")),
    ({"LOCAL_RANK": "7"}, ("LOCAL_RANK=7", "LOCAL_WORLD_SIZE=2")),
    ({"LOCAL_WORLD_SIZE": "all"}, ("LOCAL_WORLD_SIZE='all'", "unset")),
    ({"MASTER_ADDR": None}, ("MASTER_ADDR", "torchrun")),
    ({"MASTER_PORT": None}, ("MASTER_PORT", "torchrun")),
    ({"MASTER_PORT": "http"}, ("MASTER_PORT='http'", "unset")),
    ({"MASTER_PORT": "70000"}, ("MASTER_PORT='70000'", "valid port")),
]


def test_incomplete_torchrun_environment_is_rejected(subtests: pytest.Subtests) -> None:
    for changes, says in ENVIRONMENTS:
        with subtests.test(changes=changes), pytest.MonkeyPatch.context() as monkeypatch:
            for name, value in {**LAUNCHED, **changes}.items():
                if value is None:
                    monkeypatch.delenv(name, raising=False)
                else:
                    monkeypatch.setenv(name, value)
            monkeypatch.setattr(dist, "is_initialized", lambda: False)  # other tests have created a process group
            with pytest.raises(ConfigError) as caught:
                infinity.mesh("cpu")
            assert all(text in str(caught.value) for text in says), caught.value


def test_unknown_device_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"'tpu'.*'cuda' or 'cpu'"):
        infinity.mesh("tpu")


def test_invalid_infinityd_options_print_one_line_error(subtests: pytest.Subtests, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a socket")
    for options, says in [
        (["--port", "65536"], ("server.port = 65536", "maximum of 65535")),
        (["--port", "http"], ("--port", "'http'")),
        (["--host", "no-such-host.invalid", "--port", "0"], ("no-such-host.invalid", "another port")),
        (["--host", "a" * 300, "--port", "0"], ("cannot be used",)),
        (["--keep-dead-seconds", "-1"], ("stats_files.keep_dead_seconds = -1", "minimum of 0")),
        (["--config", "missing.toml"], ("missing.toml", "cannot be read")),
        (["--config", "file"], ("'file'", "not valid TOML")),
        (["--token-file", "missing"], ("server.token_file", "'missing'")),
        (["--prot", "1"], ("--prot", "--port")),
        (["start"], ("start", "infinityd -h")),
        (["--device-path", "/nope"], ("drives.paths: '/nope'", "is not a folder", "mounted")),
        (["--socket", ""], ("--socket", "empty")),
        (["--socket", "s" * 200], ("socket path", "107")),
        (["--socket", "file"], ("'file'", "not a socket", "--socket")),
        (["--socket", "missing/s"], ("'missing/s'", "No such file")),
    ]:
        with subtests.test(" ".join(options)):
            done = CliRunner().invoke(daemon, ["--runtime-dir", str(tmp_path / "run"), *options], prog_name="infinityd")
            lines = done.stderr.splitlines()
            assert done.exit_code == 2, done.output
            assert len(lines) == 1, lines
            assert lines[0].startswith("error: ")
            assert all(text in lines[0] for text in says), lines[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_of_another_user_are_ignored_or_rejected(
    subtests: pytest.Subtests, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # other users cannot access pytest's folders
        place = Path(folder)
        shutil.copytree(world / "c", place / "c")
        modes = {"": 0o755, "mine": 0o777, "tmp": 0o1777, "locked": 0o700, "closed": 0o755}
        for name, mode in modes.items():
            (place / name).mkdir(exist_ok=True)
            (place / name).chmod(mode)
        (place / "text").write_text("some words " * 1000)
        (place / "secret").touch(mode=0)
        monkeypatch.setattr(tempfile, "tempdir", str(place / "tmp"))
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", place / "mine")  # HOME is root's
        monkeypatch.chdir(place)
        run_here("train", "--help")  # imports modules that another user cannot read
        for line, status, says in [
            ("store ls c", 0, "is ignored: Permission denied"),
            ("store verify c", 0, "is ignored: Permission denied"),
            ("store gc c --yes", 0, "is ignored: Permission denied"),
            ("store ls locked", 2, "locked cannot be read: Permission denied"),
            ("export c --out mine/x", 2, "is ignored: Permission denied"),
            ("train --nvme locked", 2, "locked' cannot be opened: Permission denied"),
            ("train --nvme closed", 2, "closed' is not writable"),
            ("train --out closed/o", 2, "closed/o' cannot be created: Permission denied"),
            ("train --data secret", 2, "Permission denied"),
            ("train --config secret", 2, "'secret' cannot be read: Permission denied"),
            ("train --model secret", 2, "secret' cannot be read"),
            ("train --model locked/x", 2, "'locked/x' is not a preset"),
            ("probe closed --size 1MiB --block 4KiB --depth 1", 2, "'closed' is not writable"),
        ]:
            first, *rest = line.split()
            options = [*SMALL[1:], "--max_steps", "1", "--data", "text", "--out", "mine/o"] if first == "train" else []
            os.seteuid(65534)
            try:
                done = run_here(first, *options, *rest)
            finally:
                os.seteuid(0)
            with subtests.test(line):
                assert done.status == status, done.errors
                assert says in done.errors.replace("\n", " ")
                assert len(error_lines(done)) == 1, done.errors


def test_only_one_rank_reports_error(tmp_path: Path) -> None:
    done = run_ranks(*SMALL, "--nvme", "missing/deeper", "--out", "o")
    assert done.status == 2
    (line,) = done.errors.splitlines()
    assert line.startswith("rank ")
    assert line.endswith("error: storage.paths: 'missing/deeper' cannot be created: 'missing' is not a folder")
    assert not (tmp_path / "o").exists()


def test_model_failing_in_first_step_prints_no_traceback(tmp_path: Path) -> None:
    """The configuration is accepted, but the model fails in its first step."""
    file = tmp_path / "model.json"
    file.write_text(json.dumps(llama(attention_dropout=7)))
    done = run_here(*SMALL, "--model", file, "--max_steps", "1", "--out", "o")
    assert done.status == 2
    assert "Traceback" not in done.errors
    (error_lines,) = [line for line in done.errors.splitlines() if line.startswith("error:")]
    assert f"--model {file} failed in its first step: " in error_lines
    assert "check its config.json" in error_lines


@pytest.mark.parametrize("kind", ["BertConfig", "RobertaConfig"])
def test_bidirectional_model_is_rejected(kind: str, tmp_path: Path) -> None:
    """Its loss would approach zero. The message names the setting that makes the model causal."""
    import transformers

    from infinity_tools.presets import find_model, on_meta

    config = getattr(transformers, kind)(vocab_size=300)
    (tmp_path / "config.json").write_text(config.to_json_string())
    with pytest.raises(ConfigError, match="is_decoder"):
        on_meta(find_model("config.json"))
    for name in ("bart", "bert"):
        causal = transformers.AutoConfig.for_model(name, is_decoder=name == "bert")
        (tmp_path / "config.json").write_text(json.dumps(causal.to_dict()))
        on_meta(find_model("config.json"))


def test_shared_drive_or_tmpfs_logs_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with caplog.at_level(logging.WARNING, "infinity"):
        _say_where([str(tmp_path / "a")])
        assert not [text for text in caplog.messages if "one drive" in text]
        _say_where([str(tmp_path / "a"), str(tmp_path / "b")])
    assert any(f"{tmp_path / 'a'}, {tmp_path / 'b'} are on " in text for text in caplog.messages)
    caplog.clear()
    if " /dev/shm tmpfs " not in Path("/proc/self/mounts").read_text():
        pytest.skip("no tmpfs is mounted at /dev/shm")
    with caplog.at_level(logging.WARNING, "infinity"):
        _say_where(["/dev/shm"])
    assert caplog.messages == [
        "storage.paths: /dev/shm is in memory (tmpfs or ramfs), so the state uses host memory and is lost on reboot"
    ]


def test_check_config_validates_api_settings(tmp_path: Path) -> None:
    storage = {"paths": [str(tmp_path)]}
    with pytest.raises(ConfigError, match=r"storage\.paths contains an empty string"):
        check_config(load_config({"storage": {"paths": [""]}}))
    with pytest.raises(ConfigError, match=r"telemetry.timeline = .* cannot be written: .* is not a folder"):
        check_config(load_config({"storage": storage, "telemetry": {"timeline": str(tmp_path / "no/t.json")}}))
    with pytest.raises(ConfigError, match=r"run\.resume_step .*run\.resume = \"auto\""):
        check_config(load_config({"storage": storage, "run": {"resume": "auto", "resume_step": 3}}))
