"""Tests of models that transformers shards itself (`distributed_config`).

They use FSDP, HSDP, tensor and expert parallelism.
Training with clipping matches memory, and a checkpoint can be exported and resumed on any other device mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import ConfigError, UnsupportedError
from infinity.store.folder import RunFolder
from infinity.store.marker import look_for_runs
from support.ranks import RankPool
from support.train import MIB, Paging, settings

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
CONFIGS: dict[str, Any] = {
    "Llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=64, num_hidden_layers=2),
    "Phi3": lambda: transformers.Phi3Config(**SMALL, intermediate_size=64, num_hidden_layers=2, pad_token_id=0),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeConfig(
        **SMALL,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_experts=4,
        num_experts_per_tok=2,
    ),
}
FSDP, REPLICATE, TP, EP = "fsdp_size", "dp_replicate_size", "tp_size", "ep_size"
State = dict[str, dict[str, torch.Tensor]]


class Training:
    """Training of a model on a device mesh, in memory or with its state on NVMe."""

    def __init__(
        self, folder: str, sizes: dict[str, int], nvme: str = "", *, on_meta: bool = False, **run: Any
    ) -> None:
        from transformers.distributed.configuration_utils import DistributedConfig

        build = infinity if on_meta else transformers.AutoModelForCausalLM
        self.model = build.from_pretrained(
            folder, distributed_config=DistributedConfig(**sizes), dtype=torch.float32
        ).train()
        self.batch = dist.get_rank() // sizes.get(TP, 1)  # ranks of a tensor-parallel group have equal batches
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        if nvme:
            config = settings(Path(nvme), Paging(update_schedule="in_forward"), 64 * MIB, run=run)
            self.optimizer = infinity.offload(self.model, self.optimizer, config)

    def run(self, steps: range) -> list[float]:
        """Take steps with clipping, and return their losses and gradient norms."""
        losses, norms = [], []
        for step in steps:
            torch.manual_seed(10 * step + self.batch)
            tokens = torch.randint(SMALL["vocab_size"], (2, 16))
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            norms.append(float(self.clip(0.1)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses + norms

    def clip(self, most: float) -> torch.Tensor:
        """Clip the gradients, in memory as transformers' `Trainer` does if they are on several meshes."""
        if isinstance(self.optimizer, infinity.PagedOptimizer):
            return self.optimizer.clip_grad_norm_(most)
        of_mesh: dict[Any, list[Any]] = {}
        for param in self.model.parameters():
            of_mesh.setdefault(param.device_mesh, []).append(param)
        totals = [get_total_norm([param.grad for param in params]) for params in of_mesh.values()]
        norm = torch.linalg.vector_norm(torch.stack([total.full_tensor() for total in totals]))
        for params in of_mesh.values():
            clip_grads_with_norm_(params, most, norm if len(totals) > 1 else totals[0])
        return norm

    def state(self) -> State:
        """Return the full weights and moments."""
        found = {}
        for name, param in self.model.named_parameters():
            moments = {key: value for key, value in self.optimizer.state[param].items() if value.dim()}
            values = {"master": param, **moments}
            found[name] = {
                key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
                for key, value in values.items()
            }
        return found


def differences(one: State, other: State) -> list[str]:
    """Return the names of unequal tensors."""
    assert one.keys() == other.keys()
    return [f"{name}/{key}" for name in one for key in one[name] if not torch.equal(one[name][key], other[name][key])]


def compare(folder: str, sizes: dict[str, int], nvme: str, on_meta: bool) -> list[str]:
    """Return the differences from memory on this rank."""
    memory, paged = Training(folder, sizes), Training(folder, sizes, nvme, on_meta=on_meta)
    expected, found = memory.run(range(3)), paged.run(range(3))
    assert len(set(found)) == 6
    listed = differences(memory.state(), paged.state()) + (["losses"] if expected != found else [])
    paged.optimizer.close()
    return listed


def resume(folder: str, sizes: dict[str, int], nvme: str, before: State | None) -> tuple[list[str], State]:
    """Resume, compare the state with `before`, and train one step.

    Returns:
        Differences, also of exports of the live run, and the state at the end.
    """
    training = Training(folder, sizes, nvme, **({"resume": "latest"} if before else {}))
    start = training.optimizer.steps
    listed = differences(before, training.state()) if before else []
    training.run(range(start, start + 1))
    training.optimizer.save_checkpoint()
    state = training.state()
    out = Path(nvme, f"export{start}")
    training.optimizer.save_pretrained(out)
    saved = load_file(out / "model.safetensors") if dist.get_rank() == 0 else {}
    training.optimizer.close()
    # transformers stores the experts of a layer separately
    kept = {name: values["master"] for name, values in state.items() if name in saved}
    listed += [f"export of {name}" for name, value in kept.items() if not torch.equal(value, saved[name])]
    return listed, state


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    """Four ranks."""
    pool = RankPool(4)
    yield pool
    pool.close()


def saved(kind: str, tmp_path: Path) -> str:
    """Save a model with random weights, and return its folder."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("Llama", {FSDP: 2, TP: 2}),
        ("Qwen3-MoE", {FSDP: 4, EP: 2}),
        pytest.param("Llama", {FSDP: 2, REPLICATE: 2}, marks=pytest.mark.wide),
        pytest.param("Phi3", {FSDP: 2, TP: 2}, marks=pytest.mark.wide),
        pytest.param("Qwen3-MoE", {FSDP: 4, EP: 4}, marks=pytest.mark.wide),
        pytest.param("Qwen3-MoE", {FSDP: 2, TP: 2, EP: 2}, marks=pytest.mark.wide),
        pytest.param("Qwen3-MoE", {FSDP: 2, REPLICATE: 2, EP: 2}, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_training_matches_memory(kind: str, sizes: dict[str, int], tmp_path: Path, four: RankPool) -> None:
    """Also if `infinity.offload` streams the weights to NVMe, without a copy in memory."""
    for on_meta in (False, True):
        (nvme := tmp_path / str(on_meta)).mkdir()
        assert four.run(compare, saved(kind, nvme), sizes, str(nvme), on_meta) == [[]] * 4, on_meta


@pytest.mark.parametrize(
    ("kind", "meshes"),
    [
        ("Llama", [{FSDP: 4}, {FSDP: 2, TP: 2}, {FSDP: 2, REPLICATE: 2}]),
        pytest.param("Phi3", [{FSDP: 2, TP: 2}, {FSDP: 4}], marks=pytest.mark.wide),
        pytest.param("Qwen3-MoE", [{FSDP: 4, EP: 2}, {FSDP: 4}, {FSDP: 2, TP: 2, EP: 2}], marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_checkpoint_is_read_on_any_mesh(
    kind: str, meshes: list[dict[str, int]], tmp_path: Path, four: RankPool
) -> None:
    """Every mesh resumes the checkpoint of the one before. Then the checkpoint is read without ranks."""
    folder, state = saved(kind, tmp_path), None
    for sizes in meshes:
        found = four.run(resume, folder, sizes, str(tmp_path), state)
        assert [listed for listed, _ in found] == [[]] * 4, sizes
        state = found[0][1]
    newest = look_for_runs([str(tmp_path / "nvme0")])[0][-1]
    reader = CheckpointReader(RunFolder(newest.run_id, newest.in_order))
    for index, spec in enumerate(reader.tensors):
        for key, value in state[spec.names[0]].items():
            assert torch.equal(reader.read(index, key), value), (spec.names, key)


@pytest.mark.parametrize(
    ("values", "arguments", "message"),
    [
        ({"tie_word_embeddings": True}, {}, r"lm_head\.weight is tied .* leave out distributed_config"),
        ({}, {"reshard_after_forward": True}, "cannot be combined with distributed_config"),
        ({}, {"adapters": object()}, "adapters cannot be combined with distributed_config"),
        ({}, {"distributed_config": {"ep_size": 3}}, "transformers cannot shard LlamaForCausalLM: .*ep_size"),
        ({}, {}, "fsdp_size=1 and dp_replicate_size=1; set one of them to more than 1"),
    ],
)
def test_unsupported_arguments_raise(values: dict[str, Any], arguments: dict[str, Any], message: str) -> None:
    model = transformers.LlamaConfig(**SMALL, intermediate_size=64, num_hidden_layers=1, **values)
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        infinity.from_config(
            model, auto_class="AutoModelForCausalLM", **{"distributed_config": {"fsdp_size": 1}, **arguments}
        )
