"""Weights are written in files of limited size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM

from biphasic.commands import main
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.export import write as write_module
from biphasic.model.checkpoint import read_record, read_weights, weight_shapes
from biphasic.model.encoder import load_encoder
from conftest import Write
from helpers.exports import export_language_model
from helpers.stored_checkpoints import checkpoint_of, network
from helpers.tiny import config_of, launch, train


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> Path:
    return dataset / "tokenizer"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_shards_hold_the_same_weights_as_one_file(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool, dtype: str
) -> None:
    checkpoint = str(checkpoint_of(network(), tmp_path, tokenizer, sharded))
    assert main(["export", checkpoint, str(tmp_path / "whole"), "--dtype", dtype]) == 0
    monkeypatch.setattr(write_module, "SHARD_BYTES", 6_000)
    assert main(["export", checkpoint, str(tmp_path / "cut"), "--dtype", dtype]) == 0
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 3
    assert files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    single = load_file(tmp_path / "whole" / "model.safetensors")
    for file in files:
        for name, weight in load_file(file).items():
            assert torch.equal(weight, single.pop(name)), name
            assert index["weight_map"][name] == file.name
    assert not single
    trained = read_weights(checkpoint)
    type_ = torch.float32 if dtype == "fp32" else torch.bfloat16
    for auto in (AutoModel, AutoModelForMaskedLM):
        one, other = (auto.from_pretrained(tmp_path / name, dtype=type_).state_dict() for name in ("whole", "cut"))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(one["model.norm.weight"], trained["backbone.norm.weight"].to(type_))
    assert torch.equal(one["lm_head.weight"], trained["lm_head.weight"].to(type_))


def test_the_file_equals_that_of_a_loaded_network(tmp_path: Path, tokenizer: Path) -> None:
    """Byte for byte, with an untied and a tied head."""
    for tied in (False, True):
        model, out, reference = (
            network(tie_word_embeddings=tied),
            tmp_path / f"out{tied}",
            tmp_path / f"reference{tied}",
        )
        export_language_model(model, load_tokenizer(str(tokenizer)), out)
        AutoModelForMaskedLM.from_pretrained(out).save_pretrained(reference)
        assert (out / "model.safetensors").read_bytes() == (reference / "model.safetensors").read_bytes()


def test_weights_that_do_not_fit_are_named(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(message: str, **changes: torch.Tensor | None) -> None:
        model = network()
        state = {**model.state_dict(), **{name.replace("__", "."): value for name, value in changes.items()}}
        kept = {name: value for name, value in state.items() if value is not None}
        checkpoint = str(checkpoint_of(model, tmp_path, tokenizer, sharded=False, weights=kept))
        assert main(["export", checkpoint, str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"checkpoint {checkpoint}: {message}\n"
        assert not (tmp_path / "out").exists()

    fails("lacks 1 weights that EuroBertForMaskedLM has, e.g. model.norm.weight", backbone__norm__weight=None)
    fails("has 1 weights that EuroBertForMaskedLM doesn't have, e.g. model.extra", backbone__extra=torch.ones(2))
    fails("model.norm.weight has shape [7]; EuroBertForMaskedLM expects [32]", backbone__norm__weight=torch.ones(7))


def test_shapes_and_some_weights_of_a_run_s_checkpoints(write_yaml: Write, tmp_path: Path) -> None:
    """Of a file and of a sharded folder."""
    file = train(config_of(write_yaml("file", max_duration="8ba"))) / "checkpoints" / "ba8-rank0.pt"
    path = write_yaml("two", parallelism__strategy="fsdp", max_duration="8ba", checkpoint__interval="8ba")
    launched = launch(path, processes=2)
    assert launched.returncode == 0, launched.stderr[-3000:]
    for checkpoint in (file, Path(config_of(path).output) / "two" / "checkpoints" / "ep0-ba8"):
        complete = read_weights(str(checkpoint))
        shapes = weight_shapes(str(checkpoint))
        assert {name: (weight.shape, weight.dtype) for name, weight in shapes.items()} == {
            name: (weight.shape, weight.dtype) for name, weight in complete.items()
        }
        assert all(weight.is_meta for weight in shapes.values())
        some = ["lm_head.weight", "backbone.layers.1.mlp.up_proj.weight"]
        weights = read_weights(str(checkpoint), some)
        assert list(weights) == some
        assert all(torch.equal(weights[name], complete[name]) for name in some)
        assert read_record(str(checkpoint))["batches"] == 8
        out = tmp_path / f"out-{checkpoint.name}"
        assert main(["export", str(checkpoint), str(out)]) == 0
        written = load_file(out / "model.safetensors")
        assert torch.equal(written["model.norm.weight"], complete["backbone.norm.weight"])


def test_the_record_is_read_without_weights(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sharded checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    path = str(checkpoint_of(network(), tmp_path, tokenizer, sharded=True))
    names: list[str] = []
    read = FileSystemReader.read_data

    def count(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        names.extend(item.storage_index.fqn for item in plan.items)
        return read(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", count)
    assert read_record(path)["batches"] == 40
    assert all(name.startswith("state.callbacks.") for name in names)
    names.clear()
    read_weights(path, ["lm_head.weight"])
    assert names == ["state.model.model.lm_head.weight"]


def test_a_truncated_sharded_checkpoint_is_refused(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(network(), tmp_path, tokenizer, sharded=True)
    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"checkpoint {checkpoint}: is damaged or incomplete (")
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_named(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_module, "SHARD_BYTES", 6_000)
    out = tmp_path / "out"
    export_language_model(network(), load_tokenizer(str(tokenizer)), out)
    missing = sorted(out.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(UserError, match=f"model {out}: its .* names {missing.name}, which") as caught:
        load_encoder(str(out))
    assert "\n" not in str(caught.value)
