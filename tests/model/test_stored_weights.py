"""A folder without weights that can be loaded is refused by name, alike in the plan and at the start of every job."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from biphasic.config.plan import StartPlan, plan
from biphasic.errors import UserError
from biphasic.model.backbone import load_language_model
from biphasic.model.stored_weights import weights_problem
from conftest import Write
from helpers.decoders import saved_decoder
from helpers.tiny import config_of

WEIGHTS = "model.safetensors"


def rename(folder: Path, new_name: Callable[[str], str]) -> None:
    weights = {new_name(name): weight for name, weight in load_file(folder / WEIGHTS).items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def adapter(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))


def nested(folder: Path) -> None:
    shutil.copytree(folder, folder / "0_Transformer")
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text("{}")
    (folder / "modules.json").write_text("[]")
    for name in (WEIGHTS, "config.json"):
        (folder / name).unlink()


def only(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"GGUF")

    return change


def pointer(folder: Path) -> None:
    (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n")


def without_a_shard(folder: Path) -> None:
    names = load_file(folder / WEIGHTS)
    files = {name: f"model-0000{1 + name.startswith('lm_head')}-of-00002.safetensors" for name in names}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / WEIGHTS).rename(folder / "model-00002-of-00002.safetensors")


def prefixed_pickle(folder: Path) -> None:
    """Its names show only once it is loaded."""
    weights = load_file(folder / WEIGHTS)
    torch.save({f"module.{name}": weight for name, weight in weights.items()}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


FOLDERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "adapter": (adapter, "is an adapter of org/base, without that model's weights: merge it into its base model (merge_and"),
    "nested": (nested, "/0_Transformer: name that folder"),
    "gguf": (only("m.gguf"), "has weights in m.gguf only, which can't be read: expected model.safetensors"),
    "onnx": (only("onnx/model.onnx"), "has weights in onnx/model.onnx only, which can't be read"),
    "nothing": (only("notes.txt"), "has no weights: expected model.safetensors or pytorch_model.bin"),
    "lfs": (pointer, "model.safetensors is a pointer of Git LFS instead of weights: fetch them with git lfs pull"),
    "shard": (without_a_shard, "names model-00001-of-00002.safetensors, which isn't there"),
    "compiled": (lambda folder: rename(folder, "_orig_mod.{}".format), "names of its weights begin with _orig_mod. (of"),
    "parallel": (lambda folder: rename(folder, "module._orig_mod.{}".format), "begin with module._orig_mod. (of"),
    "unmerged": (
        lambda folder: rename(folder, lambda name: name.replace("q_proj.", "q_proj.base_layer.")),
        "e.g. model.layers.0.self_attn.q_proj.base_layer.weight: merge it into its base model",
    ),
    "lora": (
        lambda folder: rename(folder, lambda name: name.replace("mlp.up_proj.", "mlp.lora_A.default.")),
        "e.g. model.layers.0.mlp.lora_A.default.weight: merge it into its base model",
    ),
}


@pytest.mark.parametrize("name", list(FOLDERS))
def test_plan_and_start_refuse_a_folder_alike(name: str, tmp_path: Path, write_yaml: Write) -> None:
    folder = tmp_path / "model"
    saved_decoder("llama", folder)
    config = config_of(write_yaml(model={"init_from": str(folder)}))
    assert not plan(config, 1).problems
    FOLDERS[name][0](folder)
    [problem] = plan(config, 1).problems
    assert problem.startswith(f"model {folder}: ") and FOLDERS[name][1] in problem
    with pytest.raises(UserError) as refused:
        load_language_model(str(folder))
    assert str(refused.value) == problem
    # A run that resumes doesn't read the folder.
    assert not plan(config, 1, start=StartPlan(4, "ba4-rank0.pt")).problems


def test_the_prefix_of_pickled_weights_is_named_once_they_are_loaded(tmp_path: Path) -> None:
    saved_decoder("llama", tmp_path)
    prefixed_pickle(tmp_path)
    assert weights_problem(str(tmp_path)) is None
    with pytest.raises(UserError, match=r"all names of its weights begin with module\. \(of"):
        load_language_model(str(tmp_path))


@pytest.mark.parametrize("content", [b"", b"cut off", b"\xff" * 9, b"\x02\0\0\0\0\0\0\0[]", b"\x01\0\0\0\0\0\0\0" + b"3"])
def test_a_damaged_header_is_left_to_loading(content: bytes, tmp_path: Path) -> None:
    saved_decoder("llama", tmp_path)
    (tmp_path / WEIGHTS).write_bytes(content)
    assert weights_problem(str(tmp_path)) is None
    with pytest.raises(UserError, match=r"can't be loaded \("):
        load_language_model(str(tmp_path))


def test_other_places_are_not_judged(tmp_path: Path) -> None:
    """A hub id, a checkpoint, a run's folder, a model whose own code names weights as it likes."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "ba4-rank0.pt").write_bytes(b"")
    for place in ("org/model", str(tmp_path / "run"), str(tmp_path / "ba4-rank0.pt")):
        assert weights_problem(place) is None
    saved_decoder("llama", tmp_path)
    rename(tmp_path, "module.{}".format)
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "auto_map": {"AutoModel": "own.OwnModel"}}))
    assert weights_problem(str(tmp_path)) is None
