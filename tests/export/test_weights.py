"""Weights go from a checkpoint to a folder in files of limited size, and never lie in memory twice."""

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

from biphasic.config.errors import UserError
from biphasic.data.tokenizer import load_tokenizer
from biphasic.export import __main__ as command
from biphasic.export import weights as writing
from biphasic.export.weights import Weights, write_weights
from biphasic.export.write import export_language_model
from biphasic.model.checkpoint import read_checkpoint, read_record, read_weights, weight_shapes
from biphasic.model.encoder import load_encoder
from biphasic.model.fresh import from_hf_config
from conftest import Write
from stored_checkpoints import checkpoint_of, network
from tiny import config_of, launch, train

FULL = 250_000_000
"""Bytes of weights in the tests of memory: much more than what else comes and goes."""


@pytest.fixture(scope="module")
def tokenizer(dataset: Path) -> Path:
    return dataset / "tokenizer"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_shards_are_the_whole_cut_up(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool, dtype: str
) -> None:
    checkpoint = str(checkpoint_of(network(), tmp_path, tokenizer, sharded))
    assert command.main([checkpoint, str(tmp_path / "whole"), "--dtype", dtype]) == 0
    monkeypatch.setattr(writing, "SHARD_BYTES", 6_000)
    monkeypatch.setattr(writing, "PORTION_BYTES", 3_000)
    assert command.main([checkpoint, str(tmp_path / "cut"), "--dtype", dtype]) == 0
    files = sorted((tmp_path / "cut").glob("*.safetensors"))
    assert len(files) > 3
    assert files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in files}
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    for file in files:
        for name, weight in load_file(file).items():
            assert torch.equal(weight, whole.pop(name)), name
            assert index["weight_map"][name] == file.name
    assert not whole
    trained = read_checkpoint(checkpoint).weights
    type_ = torch.float32 if dtype == "fp32" else torch.bfloat16
    for auto in (AutoModel, AutoModelForMaskedLM):
        one, other = (auto.from_pretrained(tmp_path / name, dtype=type_).state_dict() for name in ("whole", "cut"))
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(one["model.norm.weight"], trained["backbone.norm.weight"].to(type_))
    assert torch.equal(one["lm_head.weight"], trained["lm_head.weight"].to(type_))


def test_files_are_transformers_own(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes that `save_pretrained` writes, whole and in shards, with a head of its own and with a tied one."""
    for tied in (False, True):
        model, out = network(tie_word_embeddings=tied, num_hidden_layers=11), tmp_path / f"ours{tied}"
        for limit in (5_000_000_000, 6_000):
            monkeypatch.setattr(writing, "SHARD_BYTES", limit)
            loaded = load_tokenizer(str(tokenizer))
            export_language_model(model, loaded, out, "card", dtype=torch.float32, force=True)
            theirs = tmp_path / f"theirs{tied}{limit}"
            AutoModelForMaskedLM.from_pretrained(out).save_pretrained(theirs, max_shard_size=limit)
            names = sorted(file.name for file in theirs.iterdir() if file.name.startswith("model"))
            assert names == sorted(file.name for file in out.iterdir() if file.name.startswith("model"))
            for name in names:
                assert (out / name).read_bytes() == (theirs / name).read_bytes(), name


def test_weights_that_do_not_fit_are_named(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(says: str, **changes: torch.Tensor | None) -> None:
        model = network()
        state = {**model.state_dict(), **{name.replace("__", "."): value for name, value in changes.items()}}
        kept = {name: value for name, value in state.items() if value is not None}
        checkpoint = str(checkpoint_of(model, tmp_path, tokenizer, sharded=False, weights=kept))
        assert command.main([checkpoint, str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err == f"checkpoint {checkpoint}: {says}\n"
        assert not (tmp_path / "out").exists()

    fails("lacks 1 weights that EuroBertForMaskedLM has, e.g. model.norm.weight", backbone__norm__weight=None)
    fails("has 1 weights that EuroBertForMaskedLM has no place for, e.g. model.extra", backbone__extra=torch.ones(2))
    fails("model.norm.weight is [7], where EuroBertForMaskedLM has [32]", backbone__norm__weight=torch.ones(7))


def test_shapes_and_parts_of_a_run_s_checkpoints(write_yaml: Write, tmp_path: Path) -> None:
    """A file's and a sharded folder's, as a run writes them."""
    file = train(config_of(write_yaml("file", max_duration="8ba"))) / "checkpoints" / "ba8-rank0.pt"
    path = write_yaml("two", parallelism__strategy="fsdp", max_duration="8ba", checkpoint__interval="8ba")
    launched = launch(path, processes=2)
    assert launched.returncode == 0, launched.stderr[-3000:]
    for checkpoint in (file, Path(config_of(path).output) / "two" / "checkpoints" / "ep0-ba8"):
        whole = read_checkpoint(str(checkpoint))
        shapes = weight_shapes(str(checkpoint))
        assert {name: (one.shape, one.dtype) for name, one in shapes.items()} == {
            name: (one.shape, one.dtype) for name, one in whole.weights.items()
        }
        assert all(one.is_meta for one in shapes.values())
        some = ["lm_head.weight", "backbone.layers.1.mlp.up_proj.weight"]
        found = read_weights(str(checkpoint), some)
        assert list(found) == some
        assert all(torch.equal(found[name], whole.weights[name]) for name in some)
        assert read_record(str(checkpoint)) == whole.record
        out = tmp_path / f"out-{checkpoint.name}"
        assert command.main([str(checkpoint), str(out)]) == 0
        written = load_file(out / "model.safetensors")
        assert torch.equal(written["model.norm.weight"], whole.weights["backbone.norm.weight"])


def test_the_record_is_read_alone(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sharded checkpoint, no weight comes along."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    path = str(checkpoint_of(network(), tmp_path, tokenizer, sharded=True))
    asked: list[str] = []
    read = FileSystemReader.read_data

    def count(self: FileSystemReader, plan: Any, planner: Any) -> Any:
        asked.extend(item.storage_index.fqn for item in plan.items)
        return read(self, plan, planner)

    monkeypatch.setattr(FileSystemReader, "read_data", count)
    assert read_record(path)["batches"] == 40
    assert all(name.startswith("state.callbacks.") for name in asked)
    asked.clear()
    read_weights(path, ["lm_head.weight"])
    assert asked == ["state.model.model.lm_head.weight"]


def test_a_sharded_checkpoint_that_lost_a_file(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoint_of(network(), tmp_path, tokenizer, sharded=True)
    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 3])
    assert command.main([str(checkpoint), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"checkpoint {checkpoint}: is damaged or incomplete (")
    assert said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_that_lost_a_shard(tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", 6_000)
    out = tmp_path / "out"
    export_language_model(network(), load_tokenizer(str(tokenizer)), out, "card", dtype=torch.float32)
    lost = sorted(out.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(UserError, match=f"model {out}: can't be loaded .*{lost.name}") as caught:
        load_encoder(str(out))
    assert "\n" not in str(caught.value)


def test_a_network_s_weights_are_its_own(tmp_path: Path) -> None:
    """What `Weights.held` gives may be saved while the network goes on; names may be changed."""
    model = network()
    found = Weights.held(model.state_dict()).renamed(lambda name: f"x.{name}")
    assert set(found.shapes) == {f"x.{name}" for name in model.state_dict()}
    [weight] = found.read(["x.backbone.norm.weight"]).values()
    assert torch.equal(weight, model.backbone.norm.weight)  # pyright: ignore[reportArgumentType]
    assert not weight.requires_grad
    with pytest.raises(UserError, match=r"lacks 1 weights that Linear has, e\.g\. bias"):
        write_weights(Weights.held({"weight": torch.ones(2, 2)}), torch.nn.Linear(2, 2), tmp_path, torch.float32)
    assert not list(tmp_path.iterdir())


MEASURE = """
import sys
import biphasic.export.write, biphasic.export.card, torch.distributed.checkpoint.state_dict_loader, torch._dynamo
from biphasic.data.tokenizer import load_tokenizer
from biphasic.export import __main__ as command
from biphasic.export import weights
from biphasic.export.formats import format_of
from pathlib import Path
from transformers import LlamaConfig

def resident(name):
    return int(next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith(name)))

tiny = LlamaConfig(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
format_of(tiny, load_tokenizer(sys.argv[3])).network("masked_lm")
weights.PORTION_BYTES = int(sys.argv[5])
# From here on, and of this program alone: getrusage knows only the highest ever, its parent's included.
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
assert command.main([*sys.argv[1:3], "--dtype", sys.argv[4]]) == 0
print(resident("VmHWM") - before)
"""


@pytest.mark.parametrize(("sharded", "dtype"), [(True, "fp32"), (False, "bf16")])
def test_memory_is_a_file_s(tmp_path: Path, tokenizer: Path, sharded: bool, dtype: str) -> None:
    """Once the weights that are written, and a portion of those that are read: not the checkpoint's twice."""
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
