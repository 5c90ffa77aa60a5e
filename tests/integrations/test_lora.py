"""Tests of LoRA with peft: the base is read from its checkpoint and never written; adapters are saved and exported."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import infinity
from infinity.checkpoint.reader import CheckpointReader
from infinity.content.format import Role
from infinity.content.layout import Page
from infinity.errors import BudgetError, ConfigError, UnsupportedError
from infinity.estimate.estimate import Workload, estimate
from infinity.estimate.model import with_lora
from infinity.formats.safetensors import export_safetensors
from infinity.run.space_reservation import FileSpace
from infinity_tools.plan.shapes import shape_of
from infinity_tools.presets import find_model
from support import adapted, models
from support.adapted import ADAPTED
from support.ranks import RankPool
from support.tables import all_but, variants
from support.traffic import STEADY, WARM, machine_of, matches_plan, wait_until_idle
from support.train import PAGE, Outcome, Paging, Recipe, batch, compare, host_bytes, settings, train

RANK = 4
FROZEN_BYTES = 2 * 2
"""Bytes read per frozen bf16 parameter per step: 2 in forward and 2 in backward."""


def base(layers: int = 4) -> Any:
    """Return a base in bf16 with its original buffers, as `from_pretrained` does."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        config = adapted.llama(layers=layers, width=128, vocabulary=256).config
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def with_adapter(make: Any) -> Any:
    """Return a base with LoRA adapters for every matrix of its layers."""
    import peft

    config = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(make(), config)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of the trainable parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3, fused=True)


def sharded(*, meta: bool = False, layers: int = 4) -> Any:
    """Return a sharded base with adapters."""
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = with_adapter(lambda: base(layers))
    return models.shard(model)


def config(folder: Path, host: int | str = "2MiB", **run: Any) -> dict[str, Any]:
    """Return settings with all folders under `folder`."""
    return settings(folder, Paging(), host, run=run)  # type: ignore[arg-type]


class Transfers:
    """Counts of the page transfers of a store."""

    def __init__(self, store: Any) -> None:
        self.read: Counter[int] = Counter()
        self.written: Counter[int] = Counter()
        for name, counter in (("read", self.read), ("write", self.written)):
            setattr(store, name, self._counting(getattr(store, name), counter))

    @staticmethod
    def _counting(function: Any, counter: Counter[int]) -> Any:
        def counted(page: int, *arguments: Any) -> None:
            counter[page] += 1
            function(page, *arguments)

        return counted

    def bytes_of(self, counter: Counter[int], pages: list[Page]) -> int:
        """Return the bytes transferred for the given pages."""
        return sum(counter[page.index] * page.nbytes for page in pages)


def test_base_is_read_twice_per_step_and_never_written(tmp_path: Path) -> None:
    """With nothing cached, a step reads 4 bytes per base parameter, as planned, also with checkpoints."""
    model = sharded(layers=8)
    given = adamw(model)
    with infinity.offload(
        model, given, config(tmp_path, host_bytes(Paging(host_cache="least"), model, given, tmp_path))
    ) as o:
        recipe = Recipe(steps=WARM)
        train(recipe, model, o, Outcome())
        wait_until_idle(o)
        seen, before = Transfers(o.run.store), o.run.ledger.total_bytes
        for part in range(2):
            steps = Recipe(steps=WARM + (part + 1) * STEADY // 2)
            train(steps, model, o, Outcome(), first=WARM + part * STEADY // 2)
            o.save_checkpoint()
        wait_until_idle(o)
        layout = o.run.layout
        fixed = [page for page in layout.pages if page.fixed]
        counted = {op: value - before[op] for op, value in o.run.ledger.total_bytes.items()}
        frozen = [shard for shard in layout.shards if not shard.spec.trainable]
        # The root's weights stay gathered from forward to backward, so they are read once.
        twice = sum(shard.spec.numel for shard in frozen if shard.fsdp_module != 0)
        once = sum(shard.spec.numel for shard in frozen if shard.fsdp_module == 0)
        expected = FROZEN_BYTES * twice + FROZEN_BYTES // 2 * once
        found = seen.bytes_of(seen.read, fixed) / STEADY
        assert 0.9 * expected <= found <= 1.01 * expected, "pages used last in forward and first in backward are kept"
        assert all(seen.read[page.index] <= 2 * STEADY for page in fixed)
        assert sum(seen.read[page.index] == 2 * STEADY for page in fixed) > 0.8 * len(fixed)
        assert seen.bytes_of(seen.written, fixed) == 0
        assert counted["write"] == seen.bytes_of(seen.written, list(layout.pages)) > 0
        assert matches_plan(counted["read"], STEADY * o.run.plan.traffic.read_bytes)
        # Checkpoints flush the adapter pages in the host cache, which are written again if the next step changes them.
        assert counted["write"] <= 1.01 * STEADY * o.run.plan.traffic.written_bytes + 2 * layout.state_bytes
        assert {layout.segments[page.segment].format.param for page in fixed} == {"bfloat16"}
        assert all(page.role is Role.PARAM for page in fixed), "bf16 weights have no master weights"


def test_base_uses_its_space_once(tmp_path: Path) -> None:
    """Each additional checkpoint needs space for the adapters only."""
    model, retained = sharded(), 3
    with infinity.offload(model, adamw(model), config(tmp_path, retained_checkpoints=retained)) as optimizer:
        layout, store = optimizer.run.layout, optimizer.run.store
        fixed = sum(page.nbytes for page in layout.pages if page.fixed)
        others = layout.state_bytes - fixed
        space = optimizer.run.stats.snapshot().value("tier_capacity_bytes", tier="nvme")
        files = list(tmp_path.glob("nvme0/**/*.pages"))
        assert sum(file.stat().st_size for file in files) == space
        pages = [page.index for page in layout.pages if page.fixed]
        optimizer.save_checkpoint()
        at_start = store.versions(pages)
        for step in range(retained + 1):
            train(Recipe(steps=step + 1), model, optimizer, Outcome(), first=step)
            optimizer.save_checkpoint()
        ended = sum(file.stat().st_size for file in files)
        assert store.versions(pages) == at_start
        assert fixed + (1 + retained) * others <= ended <= space  # the space of gradients may be freed
        assert space <= fixed + (2 + retained) * others  # includes slots for writes in flight and for gradients


def no_space(space: FileSpace, slots: Any) -> None:
    """Raise the error of a full drive."""
    raise BudgetError("the drive is full")


def test_merge_adapter_matches_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    memory, model = sharded(), sharded()
    given = adamw(memory)
    with infinity.offload(model, adamw(model), config(tmp_path)) as optimizer:
        for trained, by in ((memory, given), (model, optimizer)):
            train(Recipe(steps=2), trained, by, Outcome())
            trained.merge_adapter()
        name = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"
        assert torch.equal(model.get_parameter(name).full_tensor(), memory.get_parameter(name).full_tensor())
        assert torch.equal(logits(model), logits(memory))


def test_edited_frozen_weight_is_saved(tmp_path: Path) -> None:
    """Space is allocated on the first edit; earlier checkpoints contain the old value, later ones the new value."""
    model = sharded()
    name = "base_model.model.model.layers.1.mlp.up_proj.base_layer.weight"
    with infinity.offload(model, adamw(model), config(tmp_path, retained_checkpoints=2)) as optimizer:
        train(Recipe(steps=1), model, optimizer, Outcome())
        optimizer.save_checkpoint()
        param = model.get_parameter(name)
        old = param.full_tensor().clone()
        for number in range(4):  # more edits than slots
            with torch.no_grad():
                param.mul_(2)
            assert torch.equal(param.full_tensor(), old * 2 ** (number + 1))
        train(Recipe(steps=2), model, optimizer, Outcome(), first=1)
        optimizer.save_checkpoint()
        folder, losses = optimizer.run.folder, Outcome()
        train(Recipe(steps=3), model, optimizer, losses, first=2)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(FileSpace, "allocate", no_space)
            other = model.get_parameter(name.replace("layers.1", "layers.2"))
            before = other.full_tensor().clone()
            with pytest.raises(BudgetError, match="the drive is full"), torch.no_grad():
                other.mul_(2)
            assert torch.equal(other.full_tensor(), before)
    for step, value in ((1, old), (2, old * 16)):
        reader = CheckpointReader(folder, step)
        index = next(i for i, spec in enumerate(reader.tensors) if name in spec.names)
        assert torch.equal(reader.read(index), value)
    again, resumed = sharded(meta=True), Outcome()
    with infinity.offload(again, adamw(again), config(tmp_path, resume="latest", retained_checkpoints=2)) as optimizer:
        train(Recipe(steps=3), again, optimizer, resumed, first=2)
    assert resumed.losses == losses.losses


def logits(model: Any) -> torch.Tensor:
    """Return the model's logits in evaluation mode for this rank's tokens."""
    model.eval()
    with torch.no_grad():
        return model(input_ids=batch(model, 999)).logits


def train_resume_and_export(folder: Path) -> None:
    """Start from the base checkpoint, train, save, resume, train and export; compare with memory after each stage."""
    import peft

    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        torch.manual_seed(1)
        base().save_pretrained(folder / "base")
    infinity.mesh("cpu")
    dist.barrier()
    model = sharded(meta=True)
    with infinity.offload(model, adamw(model), config(folder), weights=folder / "base") as optimizer:
        model.save_pretrained(folder / "begun")
        in_memory = loaded(folder, "begun", is_trainable=True)
        names = [name for name, _ in in_memory.named_parameters()]
        assert names == [name for name, _ in model.named_parameters()]
        given, memory, nvme = adamw(in_memory), Outcome(), Outcome()
        train(Recipe(steps=3), in_memory, given, memory)
        train(Recipe(steps=3), model, optimizer, nvme)
        assert nvme.losses == memory.losses
        assert len(set(nvme.losses)) == 3
        optimizer.save_checkpoint()
    model = sharded(meta=True)
    with infinity.offload(model, adamw(model), config(folder, resume="latest")) as optimizer:
        train(Recipe(steps=5), in_memory, given, memory, first=3)
        train(Recipe(steps=5), model, optimizer, nvme, first=3)
        assert nvme.losses == memory.losses
        model.save_pretrained(str(folder / "saved"))
        model.eval()
        in_memory.eval()
        assert torch.equal(logits(model), logits(in_memory))
        optimizer.save_checkpoint()
        run = optimizer.run.folder
    assert torch.equal(logits(loaded(folder, "saved")), logits(in_memory))
    if rank == 0:
        written = export_safetensors(CheckpointReader(run), folder / "exported", file_bytes=1 << 30)
        assert {file.name for file in written} == {"adapter_model.safetensors", "adapter_config.json"}
        found, saved = (load_file(folder / name / "adapter_model.safetensors") for name in ("exported", "saved"))
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in saved)
        configs = [json.loads((folder / name / "adapter_config.json").read_text()) for name in ("exported", "saved")]
        assert configs[0] == configs[1]
        assert isinstance(peft.PeftConfig.from_pretrained(str(folder / "exported")), peft.LoraConfig)


def loaded(folder: Path, adapter: str, **options: Any) -> Any:
    """Return a sharded model in memory: the base in a folder with an adapter."""
    import peft
    from transformers import AutoModelForCausalLM

    base_model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16)
    return models.shard(peft.PeftModel.from_pretrained(base_model, folder / adapter, **options))


def test_lora_from_base_checkpoint_to_exported_adapter_on_two_ranks(tmp_path: Path, pair: RankPool) -> None:
    """Both ranks take part in saving, and one writes."""
    pair.run(train_resume_and_export, tmp_path)


KINDS = (
    "lora-all", "dora", "lora-saved-head", "lora-embeddings", "lora-bf16-base", "ia3", "prompt", "prefix", "oft",
    "lora-tokens", "lora-two-adapters",
)  # fmt: skip


@pytest.mark.parametrize("kind", all_but(KINDS, "dora", "lora-bf16-base", "ia3", "prefix", "oft"))
def test_peft_loads_saved_and_exported_adapters(kind: str, tmp_path: Path) -> None:
    """Files saved from the model and exported from a checkpoint are equal, and give the logits of the trained model."""
    import peft

    torch.manual_seed(0)
    model: Any = models.shard(adapted.ADAPTED[kind]())
    with infinity.offload(model, adamw(model), config(tmp_path)) as optimizer:
        train(Recipe(steps=2), model, optimizer, Outcome())
        model.save_pretrained(tmp_path / "saved")
        optimizer.save_checkpoint()
        expected, run = logits(model), optimizer.run.folder
    export_safetensors(CheckpointReader(run), tmp_path / "exported", file_bytes=1 << 30)
    names = sorted(str(file.relative_to(tmp_path / "exported")) for file in (tmp_path / "exported").rglob("*.*"))
    assert len(names) == 2 * len(model.peft_config)
    for name in names:
        files = [tmp_path / folder / name for folder in ("exported", "saved")]
        if name.endswith(".json"):
            assert len({file.read_text().strip() for file in files}) == 1
        else:
            found, saved = map(load_file, files)
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[key], saved[key]) for key in saved)
    torch.manual_seed(0)
    made: Any = adapted.ADAPTED[kind]()
    plain = made.get_base_model() if made.active_peft_config.is_prompt_learning else made.unload()
    again = models.shard(peft.PeftModel.from_pretrained(plain, tmp_path / "exported"))
    assert torch.equal(logits(again), expected)


def test_lora_plan_matches_measured_traffic(tmp_path: Path) -> None:
    """`infinity plan --lora`, which does not build the model, predicts bytes and space within 1%."""
    source_file = tmp_path / "config.json"
    torch.manual_seed(0)
    made = base(layers=6)
    made.config.save_pretrained(tmp_path)
    source = find_model(str(source_file))
    model = models.shard(with_adapter(lambda: made))
    dotted = {"memory.host_bytes": "1MiB", "memory.page_bytes": PAGE, "update.schedule": "in_backward"}
    chosen = infinity.Config().with_values(**{**dotted, "storage.paths": [str(tmp_path)], "run.keep": "never"})
    with infinity.offload(model, adamw(model), chosen) as optimizer:
        train(Recipe(steps=WARM), model, optimizer, Outcome())
        wait_until_idle(optimizer)
        before = optimizer.run.ledger.total_bytes
        train(Recipe(steps=WARM + STEADY), model, optimizer, Outcome(), first=WARM)
        wait_until_idle(optimizer)
        measured = {op: value - before[op] for op, value in optimizer.run.ledger.total_bytes.items()}
        space = optimizer.run.stats.snapshot().value("tier_capacity_bytes", tier="nvme")
        machine = machine_of(optimizer.run)
    work = Workload(
        batch_tokens=48,
        sequence=24,
        world_size=1,
        micro_batches=1,
        layer_major=True,
        clipping=False,
        computed="bfloat16",
    )
    found = estimate(with_lora(shape_of(source), RANK, "bfloat16"), work, machine, chosen)
    assert matches_plan(measured["read"], STEADY * found.traffic.read_bytes)
    assert matches_plan(measured["write"], STEADY * found.traffic.written_bytes)
    assert found.drive_bytes == pytest.approx(space, rel=0.01)


def check_unsupported(folder: Path, model: nn.Module, message: str) -> None:
    """Check that a model is not supported and that nothing is written."""
    with pytest.raises(UnsupportedError, match=message):
        infinity.offload(model, adamw(model), config(folder))
    assert not any((folder / "nvme0").iterdir())


def test_other_quantized_weights_are_unsupported(tmp_path: Path) -> None:
    """They are tensor subclasses, here one of PyTorch. bitsandbytes stores scales outside of the parameter."""
    made = base()
    weight = made.model.layers[0].mlp.up_proj.weight.detach()
    made.model.layers[0].mlp.up_proj.weight = nn.Parameter(TwoTensor(weight, weight.clone()), requires_grad=False)
    made.requires_grad_(False)
    made.lm_head.requires_grad_(True)
    check_unsupported(tmp_path, models.shard(made), "layers.0.mlp.up_proj.weight is of type TwoTensor")
    made = base()
    made.model.layers[1].mlp.up_proj.__class__ = type(
        "Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"}
    )
    made.requires_grad_(False)
    made.lm_head.requires_grad_(True)
    check_unsupported(tmp_path, models.shard(made), r"layers.1.mlp.up_proj .*bitsandbytes \(Linear4bit\)")


def test_weights_of_a_different_base_are_rejected(tmp_path: Path) -> None:
    """The error lists all differences by their names in the base."""
    base(layers=5).save_pretrained(tmp_path / "base")
    model = sharded(meta=True)
    with pytest.raises(ConfigError) as caught:
        infinity.offload(model, adamw(model), config(tmp_path), weights=tmp_path / "base")
    text = str(caught.value)
    assert "LlamaForCausalLM:" in text
    assert "unexpected  model.layers.4.mlp.up_proj.weight" in text
    assert "lora" not in text
    assert "missing  " not in text


def test_adapters_without_initial_values_on_meta_are_unsupported(tmp_path: Path) -> None:
    """peft computes their values from the base or in constructors, so there are none on the meta device."""
    import peft

    base().save_pretrained(tmp_path / "base")
    for kind, message in (
        (peft.LoraConfig(use_dora=True, target_modules=["q_proj"]), r"lora_magnitude_vector.*init=function"),
        (peft.IA3Config(task_type="CAUSAL_LM"), r"ia3_l.*init=function"),
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "prompt_tokens"),
    ):
        with torch.device("meta"):
            model = models.shard(peft.get_peft_model(base(), kind))
        with pytest.raises(UnsupportedError, match=message):
            infinity.offload(model, adamw(model), config(tmp_path), weights=tmp_path / "base")


def test_prompt_encoder_can_be_saved_from_the_model_only(tmp_path: Path) -> None:
    """The error of an export recommends `model.save_pretrained`."""
    model: Any = models.shard(adapted.ADAPTED["prompt-encoder"]())
    with infinity.offload(model, adamw(model), config(tmp_path)) as optimizer:
        train(Recipe(steps=1), model, optimizer, Outcome())
        model.save_pretrained(tmp_path / "saved")
        optimizer.save_checkpoint()
        run = optimizer.run.folder
    assert set(load_file(tmp_path / "saved" / "adapter_model.safetensors")) == {"prompt_embeddings"}
    with pytest.raises(ConfigError, match=r"call model.save_pretrained\(folder\)"):
        export_safetensors(CheckpointReader(run), tmp_path / "exported", file_bytes=1 << 30)


def test_fp32_base_stores_master_weights(tmp_path: Path) -> None:
    """Steps read 2 bytes per parameter; the 4 bytes of the master weight are only stored."""
    model: Any = models.shard(adapted.lora())
    with infinity.offload(model, adamw(model), config(tmp_path)) as optimizer:
        layout = optimizer.run.layout
        found = {layout.segments[page.segment].format for page in layout.pages if page.fixed}
        assert {fmt.state_bytes for fmt in found} == {6.0}
        train(Recipe(steps=2), model, optimizer, Outcome())
        trained = optimizer.run.plan.traffic.read_bytes
        assert trained <= 2 * layout.bytes_of(Role.PARAM) + sum(
            page.nbytes for page in layout.pages if page.role is Role.UPDATE and not page.fixed
        )


STEPS = 4
SETTINGS = {name: {} for name in ADAPTED} | {
    "norms": {"clip": 0.5},
    "dora": {"clip": 0.5},
    "biases": {"micro": 2},
    "lora-all": {"evaluate": True},
    "head": {"policy": "fp32"},
    "ia3": {"policy": "fp32"},
    "lora-dropout": {"checkpointing": True},
}
WIDE = (
    "lora-rank-stabilized", "lora-transposed", "lora-embeddings", "lora-tokens", "lora-reentrant", "loha", "oft",
    "prefix", "prompt-encoder", "head", "upper-layers", "tied-frozen", "norms", "lower-layers", "single-matrix",
    "tied-trained", "qlora-int8", "qlora-nf4", "lora-two-adapters", "ia3", "lora-all", "lora-dropout", "dora",
)  # fmt: skip


@pytest.mark.parametrize("name", all_but(ADAPTED, *WIDE))
def test_adapters_are_bitwise_equal_to_memory(name: str, tmp_path: Path) -> None:
    """Losses, norms, parameters and moments are compared; frozen parameters keep their values."""
    assert compare(Recipe(model=name, steps=STEPS, **SETTINGS[name]), Paging(host_cache="least"), str(tmp_path)) == []


@pytest.mark.parametrize(
    ("recipe", "paging"),
    variants(
        {name: Recipe(model=name, steps=STEPS) for name in ("lora", "lora-bf16-base", "lora-saved-head", "biases")},
        {
            "forward": Paging(host_cache="least", update_schedule="in_forward"),
            "after-middle": Paging(update_schedule="after_backward"),
            "all": Paging(host_cache="all"),
            "paths-split": Paging(host_cache="least", paths=2, format="split"),
        },
    ),
)
def test_adapters_with_other_paging_are_bitwise_equal_to_memory(recipe: Recipe, paging: Paging, tmp_path: Path) -> None:
    """The update schedule, the host cache size and the state format vary."""
    assert compare(recipe, paging, str(tmp_path)) == []


ON_TWO_RANKS = (
    "lora", "lora-all", "lora-bf16-base", "lora-saved-head", "lora-tied", "dora", "ia3", "prompt", "qlora-int8",
    "qlora-nf4", "biases", "upper-layers", "tied-frozen",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    all_but(ON_TWO_RANKS, *(name for name in ON_TWO_RANKS if name != "biases")),
)
def test_adapters_on_two_ranks_are_bitwise_equal_to_memory(name: str, tmp_path: Path, pair: RankPool) -> None:
    """Rows of small adapters are divided unevenly, and some ranks have none of them."""
    recipe = Recipe(model=name, steps=STEPS, clip=0.5 if name == "dora" else None)
    assert pair.run(compare, recipe, Paging(host_cache="least"), str(tmp_path)) == [[], []]
