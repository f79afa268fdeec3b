"""Weights are written in files of limited size, with at most one file's weights in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, LlamaConfig

from biphasic.commands import main
from biphasic.data.tokenizer import load_tokenizer
from biphasic.errors import UserError
from biphasic.export import write as write_module
from biphasic.export.write import Weights, write_weights
from biphasic.model.checkpoint import read_record, read_weights, weight_shapes
from biphasic.model.encoder import load_encoder
from biphasic.model.language_model import from_hf_config
from conftest import Write
from helpers.exports import export_language_model
from helpers.stored_checkpoints import checkpoint_of, network
from helpers.tiny import config_of, launch, train

FULL = 250_000_000
"""Bytes of weights in the tests of memory: much more than what else comes and goes."""


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
    monkeypatch.setattr(write_module, "PORTION_BYTES", 3_000)
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


def test_files_equal_those_of_save_pretrained(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, as one file and in shards, with an untied and a tied head."""
    for tied in (False, True):
        model, out = network(tie_word_embeddings=tied, num_hidden_layers=11), tmp_path / f"out{tied}"
        for limit in (5_000_000_000, 6_000):
            monkeypatch.setattr(write_module, "SHARD_BYTES", limit)
            loaded = load_tokenizer(str(tokenizer))
            export_language_model(model, loaded, out, force=True)
            reference = tmp_path / f"reference{tied}{limit}"
            AutoModelForMaskedLM.from_pretrained(out).save_pretrained(reference, max_shard_size=limit)
            names = sorted(file.name for file in reference.iterdir() if file.name.startswith("model"))
            assert names == sorted(file.name for file in out.iterdir() if file.name.startswith("model"))
            for name in names:
                assert (out / name).read_bytes() == (reference / name).read_bytes(), name


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
    with pytest.raises(UserError, match=f"model {out}: can't be loaded .*{missing.name}") as caught:
        load_encoder(str(out))
    assert "\n" not in str(caught.value)


def test_weights_in_memory_are_detached_and_renamed(tmp_path: Path) -> None:
    model = network()
    weights = Weights.in_memory(model.state_dict())
    assert set(weights.shapes) == {name.replace("backbone.", "model.", 1) for name in model.state_dict()}
    [weight] = weights.read(["model.norm.weight"]).values()
    assert torch.equal(weight, model.backbone.norm.weight)  # pyright: ignore[reportArgumentType]
    assert not weight.requires_grad
    with pytest.raises(UserError, match=r"lacks 1 weights that Linear has, e\.g\. bias"):
        write_weights(Weights.in_memory({"weight": torch.ones(2, 2)}), torch.nn.Linear(2, 2), tmp_path, torch.float32)
    assert not list(tmp_path.iterdir())


MEASURE = """
import sys
import biphasic.export.write, biphasic.export.card, torch.distributed.checkpoint.state_dict_loader, torch._dynamo
from biphasic.data.tokenizer import load_tokenizer
from biphasic.commands import main
from biphasic.export import write
from biphasic.export.formats import choose_format
from pathlib import Path
from transformers import LlamaConfig

def resident(name):
    return int(next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith(name)))

tiny = LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
choose_format(tiny, load_tokenizer(sys.argv[3])).network("ForMaskedLM")
write.PORTION_BYTES = int(sys.argv[5])
# From here on, and of this program alone: getrusage knows only the highest ever, its parent's included.
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
assert main(["export", *sys.argv[1:3], "--dtype", sys.argv[4]]) == 0
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize(("sharded", "dtype"), [(True, "fp32"), pytest.param(False, "bf16", marks=pytest.mark.slow)])
def test_memory_is_that_of_one_file(tmp_path: Path, tokenizer: Path, sharded: bool, dtype: str) -> None:
    """The written weights and a portion of those that are read, and not the checkpoint twice."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=2816, num_hidden_layers=5, num_attention_heads=16,
        max_position_embeddings=32, pad_token_id=None, initializer_range=0.02,
    )  # fmt: skip
    model = from_hf_config(config, seed=0)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > FULL
    checkpoint = checkpoint_of(model, tmp_path, tokenizer, sharded)
    del model
    portion = 40_000_000
    given = [str(checkpoint), str(tmp_path / "out"), str(tokenizer), dtype, str(portion)]
    done = subprocess.run([sys.executable, "-c", MEASURE, *given], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    grown = 1024 * int(done.stdout.splitlines()[-1])
    written = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    print(
        f"{sharded=} {dtype}: {size / 1e6:.0f} MB of weights, {written / 1e6:.0f} written, {grown / 1e6:.0f} more in memory"
    )
    # A file is mapped: what was read of it counts while it is mapped, though the system may take it back.
    assert grown < written + (2 * portion if sharded else 3 * portion) + 60_000_000
    assert grown < 1.5 * size
