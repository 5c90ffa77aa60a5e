"""Tests of the arguments of `from_pretrained` and `from_config`: folders, Hub ids, classes, and invalid values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import infinity
from infinity import torch_private
from infinity.checkpoint.reader import CheckpointReader
from infinity.errors import ConfigError, UnsupportedError
from infinity.formats.safetensors import export_safetensors
from support import fine_tune
from support.wide_models import GQA, VISION, build

transformers = pytest.importorskip("transformers")
LLAMA = fine_tune.row_of("Llama")
CHECKPOINT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Disable network access and use an empty Hub cache."""
    transformers.logging.set_verbosity_error()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def saved(folder: Path, seed: int = 1, **options: Any) -> nn.Module:
    """Save a model and return it."""
    torch.manual_seed(seed)
    model = build(LLAMA)
    model.save_pretrained(folder, **options)
    return model


def changed(folder: Path, **values: Any) -> None:
    """Change the config.json of a folder. The value None removes a key."""
    file = folder / "config.json"
    found = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


def same_weights(model: nn.Module, original: nn.Module, folder: Path) -> bool:
    """Return whether offloading a model gives it the weights of the original model."""
    with fine_tune.offload(model, folder, keep="never"):
        found = dict(model.named_parameters())
        return all(torch.equal(found[name].full_tensor(), value) for name, value in original.named_parameters())


def in_cache(hub: Path, source: Path, *, revision: str = "main") -> Path:
    """Arrange a folder like a download of org/small in the Hub cache and return the snapshot folder."""
    model = hub / "models--org--small"
    snapshot = model / "snapshots" / CHECKPOINT
    (model / "refs").mkdir(parents=True)
    (model / "refs" / revision).write_text(CHECKPOINT)
    (model / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, model / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


# Sources of weights #


def test_from_pretrained_reads_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path refers to the working directory at the call."""
    original = saved(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    model = infinity.from_pretrained("model")
    monkeypatch.chdir("/")
    assert isinstance(model, transformers.LlamaForCausalLM)
    assert model.training
    assert all(param.is_meta for param in model.parameters())
    assert same_weights(model, original, tmp_path / "run")


@pytest.mark.parametrize("size", ["1GB", "10KB"], ids=["one file", "several files"])
def test_from_pretrained_reads_the_hub_cache_offline(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only config.json and the safetensors files of a model are requested."""
    hub, requested = transformers.utils.hub, set()
    download = hub.hf_hub_download

    def noted(name: str, filename: str, **options: Any) -> str:
        requested.add(filename)
        return download(name, filename, **options)

    monkeypatch.setattr(hub, "hf_hub_download", noted)
    original = saved(tmp_path / "model", max_shard_size=size)
    snapshot = in_cache(tmp_path / "hub", tmp_path / "model")
    assert (snapshot / "model.safetensors.index.json").exists() == (size == "10KB")
    assert same_weights(infinity.from_pretrained("org/small"), original, tmp_path / "run")
    index = {"model.safetensors.index.json"} if size == "10KB" else set()
    files = {file.name for file in snapshot.glob("*.safetensors")}
    assert files <= requested <= {"config.json", "model.safetensors"} | index | files


def test_cache_dir_and_revision_are_used(tmp_path: Path) -> None:
    original = saved(tmp_path / "model")
    in_cache(tmp_path / "elsewhere", tmp_path / "model", revision="v2")
    place = {"cache_dir": tmp_path / "elsewhere", "local_files_only": True}
    assert same_weights(infinity.from_pretrained("org/small", revision="v2", **place), original, tmp_path / "run")
    for wrong in ({"revision": "v3", **place}, {"revision": "v2"}):
        with pytest.raises(ConfigError, match=r"'org/small' .* Hub"):
            infinity.from_pretrained("org/small", **wrong)


def test_incomplete_download_raises(tmp_path: Path) -> None:
    saved(tmp_path / "model", max_shard_size="10KB")
    snapshot = in_cache(tmp_path / "hub", tmp_path / "model")
    next(snapshot.glob("model-00002*")).unlink()
    with pytest.raises(ConfigError, match=r"org/small .*safetensors .*model\.safetensors"):
        infinity.from_pretrained("org/small")


def test_subfolder_is_used(tmp_path: Path) -> None:
    original = saved(tmp_path / "model" / "inner")
    assert same_weights(infinity.from_pretrained(tmp_path / "model", subfolder="inner"), original, tmp_path / "run")


def test_weights_argument_overrides_the_source_folder(tmp_path: Path) -> None:
    saved(tmp_path / "first")
    second = saved(tmp_path / "second", seed=2)
    model = infinity.from_pretrained(tmp_path / "first")
    settings = {"storage": {"paths": [str(tmp_path / "run")]}, "memory": {"host_bytes": "16MiB"}}
    with infinity.offload(model, fine_tune.adamw(model), settings, weights=tmp_path / "second"):
        assert torch.equal(model.lm_head.weight.full_tensor(), second.lm_head.weight)


def test_resumed_run_ignores_the_source_folder(tmp_path: Path) -> None:
    """The checkpoint is used even if the folder contains other values by then."""
    saved(tmp_path / "model")
    model = infinity.from_pretrained(tmp_path / "model")
    with fine_tune.offload(model, tmp_path / "run") as optimizer:
        fine_tune.train(LLAMA, model, optimizer, fine_tune.Outcome())
        optimizer.save_checkpoint()
        checkpointed = {name: param.full_tensor().clone() for name, param in model.named_parameters()}
    saved(tmp_path / "model", seed=2)
    again = infinity.from_pretrained(tmp_path / "model")
    with fine_tune.offload(again, tmp_path / "run", resume="latest"):
        assert all(torch.equal(param.full_tensor(), checkpointed[name]) for name, param in again.named_parameters())


def test_new_head_requires_strict_false(tmp_path: Path) -> None:
    """The error recommends `strict=False`; all other weights are loaded."""
    original = saved(tmp_path / "model")
    settings = {"storage": {"paths": [str(tmp_path / "run")]}, "memory": {"host_bytes": "16MiB"}}

    def make() -> Any:
        return infinity.from_pretrained(
            tmp_path / "model", auto_class="AutoModelForSequenceClassification", num_labels=3, pad_token_id=0
        )

    model = make()
    with pytest.raises(ConfigError, match=r"(?s)missing +score.weight.*strict=False"):
        infinity.offload(model, fine_tune.adamw(model), settings)
    model = make()
    with infinity.offload(model, fine_tune.adamw(model), settings, strict=False):
        assert model.score.weight.full_tensor().shape == (3, GQA["hidden_size"])
        assert model.score.weight.full_tensor().std() > 0
        assert torch.equal(model.model.norm.weight.full_tensor(), original.model.norm.weight)


def test_wrapped_model_requires_explicit_weights(tmp_path: Path) -> None:
    """The parameter names differ, so the source is not used, and nothing is initialized instead."""
    saved(tmp_path / "model")
    around = nn.Module()
    around.language = infinity.from_pretrained(tmp_path / "model")
    fully_shard(around, mesh=infinity.mesh())
    settings = {"storage": {"paths": [str(tmp_path / "run")]}}
    with pytest.raises(ConfigError, match=r"weights of language.*weights="):
        infinity.offload(around, fine_tune.adamw(around), settings)


def test_generation_config_is_loaded(tmp_path: Path) -> None:
    original = saved(tmp_path / "model")
    original.generation_config.max_new_tokens = 7
    original.generation_config.save_pretrained(tmp_path / "model")
    assert infinity.from_pretrained(tmp_path / "model").generation_config.max_new_tokens == 7


# Classes and values #


def test_auto_class_selects_the_model_class(tmp_path: Path) -> None:
    """Accepts an AutoModel class, a model class, or the name of either."""
    config = transformers.LlamaConfig(**GQA)
    for given, cls in (
        ("AutoModelForCausalLM", transformers.LlamaForCausalLM),
        (transformers.AutoModel, transformers.LlamaModel),
        ("LlamaForTokenClassification", transformers.LlamaForTokenClassification),
        (transformers.LlamaForCausalLM, transformers.LlamaForCausalLM),
    ):
        assert isinstance(infinity.from_config(config, auto_class=given), cls)
    config.architectures = ["LlamaForCausalLM"]
    assert isinstance(infinity.from_config(config), transformers.LlamaForCausalLM)


def test_text_model_of_a_multimodal_configuration() -> None:
    """The model is built from the text part of the configuration."""
    config = transformers.Gemma3Config(text_config={**GQA, "head_dim": 8}, vision_config=VISION)
    for given in ("Gemma3ForCausalLM", "AutoModelForCausalLM"):
        model = infinity.from_config(config, auto_class=given)
        assert isinstance(model, transformers.PreTrainedModel)
        assert "Gemma3" in type(model).__name__


def test_precision_and_memory_arguments() -> None:
    """By default, parameters are trained in fp32 and gathered in bf16."""
    config = transformers.LlamaConfig(**GQA, architectures=["LlamaForCausalLM"])

    def groups(**options: Any) -> list[Any]:
        model = infinity.from_config(config, **options)
        return [model, *(group for _, group in torch_private.parameter_groups(model))]

    model, _, layer, _ = groups()
    (param, *_) = torch_private.fsdp_params(layer)
    assert (param.sharded_param.dtype, torch_private.compute_dtype(param)) == (torch.float32, torch.bfloat16)
    assert param.mp_policy.reduce_dtype == torch.float32
    assert not any(torch_private.recomputes(module) for module in model.modules())
    assert layer.post_forward_mesh_info is layer.mesh_info
    model, _, layer, _ = groups(
        dtype="bfloat16", mp_policy=MixedPrecisionPolicy(), activation_checkpointing=True, reshard_after_forward=False
    )
    (param, *_) = torch_private.fsdp_params(layer)
    assert torch_private.compute_dtype(param) == param.sharded_param.dtype == torch.bfloat16
    assert [torch_private.recomputes(module) for module in model.model.layers] == [True, True]
    assert layer.post_forward_mesh_info is None
    config.dtype = torch.float64
    assert torch_private.fsdp_params(groups(dtype="auto")[1])[0].sharded_param.dtype == torch.float64
    assert infinity.from_config(config, attn_implementation="eager").config._attn_implementation == "eager"


def test_remote_code_requires_trust_remote_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    original = saved(tmp_path / "model")
    (tmp_path / "model" / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    changed(
        tmp_path / "model",
        model_type="own",
        architectures=["OwnForCausalLM"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    )
    with pytest.raises(ConfigError, match="trust_remote_code=True"):
        infinity.from_pretrained(tmp_path / "model")
    model = infinity.from_pretrained(tmp_path / "model", trust_remote_code=True)
    assert type(model).__name__.endswith("OwnForCausalLM")
    assert len(list(torch_private.parameter_groups(model))) == 3
    assert same_weights(model, original, tmp_path / "run")


def test_saves_contain_custom_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves contain the Python files of models, processors and generation, and load in transformers."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder = tmp_path / "model"
    original = saved(folder)
    (folder / "configuration_kept.py").write_text(
        "from transformers import LlamaConfig\nclass KeptConfig(LlamaConfig):\n    model_type = 'kept'\n"
    )
    (folder / "modeling_kept.py").write_text(
        "from transformers import LlamaForCausalLM\nfrom .configuration_kept import KeptConfig\n"
        "class KeptForCausalLM(LlamaForCausalLM):\n    config_class = KeptConfig\n"
    )
    (folder / "processing_kept.py").write_text("")
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text("def generate(model):\n    pass\n")
    changed(
        folder,
        model_type="kept",
        architectures=["KeptForCausalLM"],
        # the form of references in a configuration that was loaded from the Hub
        auto_map={
            "AutoConfig": "configuration_kept.KeptConfig",
            "AutoModelForCausalLM": f"{folder}--modeling_kept.KeptForCausalLM",
        },
    )
    expected = {file.name for file in folder.rglob("*.py")}
    model = infinity.from_pretrained(folder, trust_remote_code=True)
    (folder / "modeling_kept.py").unlink()  # not downloaded next to the weights; transformers has it in its cache
    with fine_tune.offload(model, tmp_path / "run", keep="never") as optimizer:
        optimizer.save_pretrained(tmp_path / "live")
        optimizer.save_checkpoint()
        export_safetensors(CheckpointReader(optimizer.run.folder), tmp_path / "export", file_bytes=1 << 30)
    shutil.rmtree(folder)
    for out in (tmp_path / "live", tmp_path / "export"):
        assert {file.name for file in out.rglob("*.py")} == expected
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
        assert all(torch.equal(value, loaded.get_parameter(name)) for name, value in original.named_parameters())


def test_parameters_frozen_by_the_class_remain_frozen(tmp_path: Path) -> None:
    """transformers makes the computed table of positions trainable when it loads the model."""
    row = fine_tune.row_of("Whisper")
    build(row).save_pretrained(tmp_path / "model")
    for model, frozen in (
        (infinity.from_pretrained(tmp_path / "model"), ["model.encoder.embed_positions.weight"]),
        (fine_tune.load(row, tmp_path / "model"), []),
    ):
        assert [name for name, param in model.named_parameters() if not param.requires_grad] == frozen


# Unsupported sources and values #


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _other_weights(folder: Path) -> None:
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")


UNSUPPORTED: dict[str, tuple[Callable[[Path], object] | None, dict[str, Any], str]] = {
    "pickles": (_pickled, {}, "pytorch_model.bin.*from_pretrained"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), {}, "has neither model.safetensors nor"),
    "malformed weights": (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), {}, "read as safetensors"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), {}, "configuration in .* cannot be read"),
    "malformed": (lambda folder: (folder / "config.json").write_text("{"), {}, "configuration in .* cannot be read"),
    "an unknown type": (lambda folder: changed(folder, model_type="llama9"), {}, "cannot be read: .*llama9"),
    "quantized": (lambda folder: changed(folder, quantization_config={"quant_method": "gptq", "bits": 4}), {},
                  r"\(gptq\).*save_pretrained"),
    "remote configuration": (lambda folder: changed(folder, model_type="own", auto_map={"AutoConfig": "own.Own"}), {},
                             "cannot be read: .*trust_remote_code=True"),
    "remote model": (lambda folder: changed(folder, architectures=["OwnForCausalLM"],
                                            auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"}), {},
                     r"OwnForCausalLM .*transformers.*trust_remote_code=True"),
    "an unknown architecture": (lambda folder: changed(folder, architectures=["LlamaForDreams"]), {},
                                r"LlamaForDreams .*transformers .*auto_class .*AutoModelForCausalLM"),
    "no architecture": (lambda folder: changed(folder, architectures=None), {},
                        "architecture.*auto_class.*AutoModel"),
    "wrong numbers": (lambda folder: changed(folder, num_attention_heads=0), {}, "cannot be (built|read)"),
    "an unknown class": (None, {"auto_class": "AutoModelForCausalML"}, "did you mean AutoModelForCausalLM"),
    "a class for images": (None, {"auto_class": "AutoModelForImageClassification"},
                           "AutoModelForImageClassification .* type llama; .*AutoModelForCausalLM"),
    "a class of a different model": (None, {"auto_class": "BertModel"}, "BertModel .*BertConfig.*LlamaConfig"),
    "not a model class": (None, {"auto_class": nn.Linear}, "auto_class=.*Linear.* must be"),
    "an unknown value": (None, {"attention_dropot": 0.1}, "attention_dropot .*; did you mean attention_dropout"),
    "an integer dtype": (None, {"dtype": "int32"}, "dtype='int32' .*floating-point"),
    "an unknown dtype": (None, {"dtype": "fp32"}, "dtype='fp32' .*floating-point"),
    "a number of ranks": (None, {"reshard_after_forward": 2}, "reshard_after_forward=2 .*True, False or None"),
}  # fmt: skip


def test_unsupported_sources_raise(tmp_path: Path) -> None:
    """The one-line message states the remedy, and no weights are read."""
    saved(tmp_path / "saved")
    for name, (change, options, words) in UNSUPPORTED.items():
        shutil.copytree(tmp_path / "saved", folder := tmp_path / name.replace(" ", "-"))
        if change is not None:
            change(folder)
        with pytest.raises(ConfigError, match=words) as caught:
            infinity.from_pretrained(folder, **options)
        assert "\n" not in str(caught.value), name


def test_offload_rejects_weights_of_a_different_model(tmp_path: Path) -> None:
    """The message lists the names, and the run folder is unchanged."""
    saved(tmp_path / "model")
    _other_weights(tmp_path / "model")
    model = infinity.from_pretrained(tmp_path / "model")
    settings = {"storage": {"paths": [str(tmp_path / "run")]}, "memory": {"host_bytes": "16MiB"}}
    with pytest.raises(ConfigError, match=r"(?s)LlamaForCausalLM.*missing .*unexpected +a\b"):
        infinity.offload(model, fine_tune.adamw(model), settings)
    assert not (tmp_path / "run").exists()


def test_invalid_sources_raise(tmp_path: Path) -> None:
    """Covers ids, a file, a name, and models that do not support checkpointing or sharding.

    The message for an unknown id includes the one of transformers.
    """
    for name in ("no/such-model", "no such model", "/no/such/folder", "a/b/c"):
        with pytest.raises(ConfigError, match=f"{name!r} .* Hub: .+"):
            infinity.from_pretrained(name)
    saved(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"model\.safetensors is a file.*from_config"):
        infinity.from_pretrained(tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"transformers.* of type str; .*infinity\.from_pretrained"):
        infinity.from_config("org/small")
    rwkv = transformers.RwkvConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, attention_hidden_size=8)
    if not transformers.RwkvForCausalLM.supports_gradient_checkpointing:
        with pytest.raises(UnsupportedError, match=r"RwkvForCausalLM .*activation_checkpointing"):
            infinity.from_config(rwkv, auto_class="AutoModelForCausalLM", activation_checkpointing=True)
