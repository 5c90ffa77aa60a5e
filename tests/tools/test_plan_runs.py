"""Tests that `infinity plan` matches actual runs: pages, events, update schedule, plan and drive space."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.config import Config
from infinity.estimate.estimate import Workload, estimate
from infinity_tools.plan.shapes import shape_of, shape_of_module
from infinity_tools.presets import find_model, on_meta, shard
from support.ranks import RankPool
from support.tables import all_but
from support.traffic import machine_of

CONFIGS = {
    "llama": {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300},
    "gpt2": {"model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 301, "n_positions": 128},
    "qwen": {"model_type": "qwen3", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
             "tie_word_embeddings": True},
    "experts": {"model_type": "mixtral", "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "num_local_experts": 4,
                "num_experts_per_tok": 2},
}  # fmt: skip


def plan_and_run(
    model: dict[str, Any],
    *,
    host_cache: str = "768KiB",
    dtype: str = "bfloat16",
    passes: int = 1,
    clip: bool = False,
    frozen: tuple[str, ...] = (),
    **settings: Any,
) -> None:
    """Plan a run, train two steps and compare both on every rank."""
    dotted = {"memory.host_bytes": host_cache, "memory.page_bytes": "64KiB"}
    dotted |= {name.replace("__", "."): value for name, value in settings.items()}
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(model))
        source = find_model(str(file))
        meta = on_meta(source)
        for name, parameter in meta.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        shape = shape_of_module(meta, source.config, "model")
        shard(meta, infinity.mesh("cpu"), bf16=dtype == "bfloat16", checkpointing=False)
        trained = [parameter for parameter in meta.parameters() if parameter.requires_grad]
        config = Config().with_values(**{**dotted, "storage.paths": [folder], "run.keep": "never"})
        optimizer = infinity.offload(meta, torch.optim.AdamW(trained, fused=True), config)
        try:
            for _ in range(2):
                for _ in range(passes):
                    tokens = torch.randint(300, (2, 32))
                    meta(input_ids=tokens, labels=tokens).loss.backward()
                if clip:
                    optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            run = optimizer.run
            work = Workload(
                batch_tokens=64 * ranks * passes,
                sequence=32,
                world_size=ranks,
                micro_batches=passes,
                layer_major=passes == 1,
                clipping=clip,
                computed=dtype,
            )
            found = estimate(shape, work, machine_of(run), config)
            if torch.distributed.get_rank() == 0:
                assert found.layout.fingerprint == run.layout.fingerprint
                assert found.layout.pages == run.layout.pages
                assert found.events == run.planner.events
                assert found.update_schedule == run.planner.schedule
                assert found.plan == run.plan
                assert found.drive_bytes == run.stats.snapshot().value("tier_capacity_bytes", tier="nvme")
                assert found.budget.host_bytes == run.host_bytes
        finally:
            optimizer.close()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (CONFIGS["llama"], {}),
    "fp32": (CONFIGS["llama"], {"dtype": "float32"}),
    "tied": (CONFIGS["gpt2"], {}),
    "qwen": (CONFIGS["qwen"], {}),
    "experts": (CONFIGS["experts"], {}),
    "clipping": (CONFIGS["llama"], {"clip": True}),
    "loop": (CONFIGS["llama"], {"passes": 3}),
    "split": (CONFIGS["llama"], {"state__format": "split"}),
    "8bit": (CONFIGS["gpt2"], {"state__format": "8bit"}),
    "after backward": (CONFIGS["llama"], {"update__schedule": "after_backward"}),
    "frozen root": (CONFIGS["llama"], {"frozen": ("model.embed", "lm_head", "model.norm")}),
    "frozen layers": (CONFIGS["llama"], {"frozen": ("model.embed", "model.layers.0", "model.layers.1")}),
    "frozen embedding": (CONFIGS["llama"], {"frozen": ("model.embed",)}),
    "two checkpoints": (CONFIGS["llama"], {"run__retained_checkpoints": 2}),
    "large host cache": (CONFIGS["llama"], {"host_cache": "64MiB"}),
    "update thread": (CONFIGS["llama"], {"update__cores": 1}),
}
FURTHER = (
    "fp32", "qwen", "8bit", "after backward", "frozen root", "frozen embedding", "two checkpoints", "large host cache"
)  # fmt: skip


@pytest.mark.parametrize("name", all_but(CASES, *FURTHER))
def test_plan_matches_run_on_one_rank(name: str) -> None:
    model, arguments = CASES[name]
    plan_and_run(model, **arguments)


@pytest.mark.parametrize("name", all_but(["tied", "clipping"], "clipping"))
def test_plan_matches_run_on_two_ranks(pair: RankPool, name: str) -> None:
    """Rows are divided unevenly, and gradients are reduced."""
    model, arguments = CASES[name]
    pair.run(_call, model, arguments)


def _call(model: dict[str, Any], arguments: dict[str, Any]) -> None:
    plan_and_run(model, **arguments)


def test_plan_counts_only_active_experts() -> None:
    """Each token uses two of four experts, and therefore half of their operations."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(CONFIGS["experts"]))
        layer = shape_of(find_model(str(file))).layers[0]
    experts = [p for p in layer.parameters if len(p.shape) == 3]
    assert experts
    assert {p.used for p in experts} == {0.5}


@pytest.mark.parametrize("slices", [pytest.param(0, marks=pytest.mark.wide), 2])
def test_planned_activations_match_run(slices: int, tmp_path: Path) -> None:
    """Bytes and drive space match for full batches with checkpointing and for micro-batches."""
    source = find_model(str(_written(tmp_path, CONFIGS["llama"])))
    model = on_meta(source)
    shape = shape_of_module(model, source.config, "model")
    shard(model, infinity.mesh("cpu"), bf16=True, checkpointing=not slices)
    if slices:
        infinity.micro_batches(model, slices)
    settings = {
        "storage.paths": [str(tmp_path)], "memory.host_bytes": "1MiB", "memory.page_bytes": "64KiB",
        "activations.tier": "nvme", "activations.host_bytes": "256KiB",
    }  # fmt: skip
    config = Config().with_values(**settings)
    optimizer = infinity.offload(model, torch.optim.AdamW(model.parameters(), fused=True), config)
    try:
        for _ in range(3):
            tokens = torch.randint(300, (8, 160))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        run = optimizer.run
        work = Workload(batch_tokens=1280, sequence=160, micro_batches=slices or 1, checkpointing=not slices)
        found = estimate(shape, work, machine_of(run), config)
        assert found.plan == run.plan
        assert found.activations.kept == run.activations.traffic.kept > 0
        assert found.activations.moved == run.activations.traffic.written > 0
        assert found.traffic.total_bytes == run.plan.traffic.total_bytes + 2 * run.activations.traffic.written
        taken = run.stats.snapshot().value("tier_capacity_bytes", tier="nvme")
        assert found.drive_bytes == pytest.approx(taken, rel=0.05)
        assert found.budget.host_bytes == run.host_bytes
        assert found.step_seconds(1280) > found.step_seconds(1280, "drives")
    finally:
        optimizer.close()


def _written(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file
