"""The mean of checkpoints equals torch's own, from files, sharded folders and buckets, and says what it was made of."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from biphasic.checkpointing import merge as merge_module
from biphasic.checkpointing.manifest import Manifest, batch_of, read_manifest
from biphasic.checkpointing.merge import merge_checkpoints, stable_checkpoints
from biphasic.checkpointing.start_rules import ResumeGuard
from biphasic.commands import main
from biphasic.config.merging import merge_weights
from biphasic.config.pretrain import PretrainConfig
from biphasic.errors import UserError
from biphasic.model.backbone import load_language_model
from biphasic.model.checkpoint import read_record, read_weights
from biphasic.model.encoder import load_encoder
from biphasic.model.language_model import from_hf_config
from biphasic.storage import open_store
from conftest import MakeBucket, Write
from helpers.buckets import bucket_for, flip_a_bit, upload, upload_to
from helpers.stored_checkpoints import checkpoint_of, network
from helpers.tiny import config_of


def stored(folder: Path, tokenizer: Path, batches: Sequence[int], **options: Any) -> list[dict[str, Tensor]]:
    """Write checkpoints of weights that drift, every second one sharded, and return their weights."""
    model, generator = network(), torch.Generator().manual_seed(len(batches))
    weights = []
    for index, batch in enumerate(batches):
        for weight in model.state_dict().values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
        weights.append({name: weight.clone() for name, weight in model.state_dict().items()})
        checkpoint_of(model, folder, tokenizer, bool(index % 2), batch=batch, **options)
    return weights


def mean_of(weights: Sequence[dict[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean in fp64."""
    stacked = {name: torch.stack([each[name].double() for each in weights], -1) for name in weights[0]}
    return {name: values @ torch.tensor(shares, dtype=torch.float64) for name, values in stacked.items()}


def assert_mean(out: Path, batch: int, expected: dict[str, Tensor]) -> None:
    merged = read_weights(str(out / f"ba{batch}-rank0.pt"))
    assert merged.keys() == expected.keys()
    for name, weight in merged.items():
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight.double(), expected[name], rtol=1e-7, atol=1e-7)


@pytest.fixture
def run(dataset: Path, tmp_path: Path) -> tuple[Path, list[dict[str, Tensor]]]:
    folder = tmp_path / "run"
    return folder, stored(folder, dataset / "tokenizer", (10, 20, 30, 40))


def paths_of(folder: Path, *batches: int) -> list[str]:
    return [str(folder / read_manifest(open_store(str(folder)), f"ba{batch}.json").path) for batch in batches]


def test_the_mean_of_files_and_sharded_checkpoints(
    run: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, weights = run
    monkeypatch.setattr(merge_module, "PORTION_BYTES", 5_000)  # several portions
    paths = paths_of(folder, 10, 20, 30, 40)
    for name, options, shares in (
        ("mean", [], [0.25] * 4),
        ("own", ["--weights", "0,1,3,4"], [0, 1 / 8, 3 / 8, 1 / 2]),
        ("linear", ["--weights", "linear"], [0.15, 1 / 3, 1 / 3, 0.55 / 3]),
    ):
        assert main(["merge", *paths, str(tmp_path / name), *options]) == 0
        made_of = read_manifest(open_store(str(tmp_path / name)), "ba40.json").run["merged"]
        assert [part["weight"] for part in made_of] == pytest.approx(shares)
        assert_mean(tmp_path / name, 40, mean_of(weights, [part["weight"] for part in made_of]))


def test_a_merged_checkpoint_says_what_it_was_made_of(
    run: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, weights = run
    out, encoder = tmp_path / "out", tmp_path / "encoder"
    assert main(["merge", *paths_of(folder, 20, 40), str(out)]) == 0
    assert f"next: biphasic export {out} {out}-encoder" in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == ["ba40-rank0.pt", "ba40.json"]
    hashes = [hashlib.sha256((folder / f"ba{batch}.json").read_bytes()).hexdigest() for batch in (20, 40)]
    made_of = [
        {"checkpoint": path, "manifest_sha256": sha256, "weight": 0.5}
        for path, sha256 in zip(paths_of(folder, 20, 40), hashes, strict=True)
    ]
    assert read_record(str(out / "ba40-rank0.pt"))["merged"] == made_of
    assert read_manifest(open_store(str(out)), "ba40.json").run["merged"] == made_of
    assert main(["export", str(out), str(encoder)]) == 0
    card = (encoder / "README.md").read_text()
    assert "-merged\n" in card and f"0.5 {made_of[0]['checkpoint']} (manifest {hashes[0]})" in card
    expected = mean_of([weights[1], weights[3]], [0.5, 0.5])["backbone.norm.weight"]
    torch.testing.assert_close(load_file(encoder / "model.safetensors")["model.norm.weight"].double(), expected)
    # As a checkpoint: for `model.init_from`, and for fine-tuning and evaluation.
    norm = load_language_model(str(out / "ba40-rank0.pt")).backbone.norm.weight  # pyright: ignore
    assert torch.equal(load_encoder(str(out / "ba40-rank0.pt")).backbone.norm.weight, norm)  # pyright: ignore
    assert torch.equal(load_encoder(str(encoder)).backbone.norm.weight, norm)  # pyright: ignore
    # The same command writes the same bytes, and never over something else.
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    assert main(["merge", *paths_of(folder, 20, 40), str(out)]) == 2
    assert "exists: choose another folder" in capsys.readouterr().err
    again = tmp_path / "again" / "out"
    assert main(["merge", *paths_of(folder, 20, 40), str(again)]) == 0
    assert {file.name: file.read_bytes() for file in again.iterdir()} == before


def test_from_a_bucket_one_at_a_time(
    run: tuple[Path, list[dict[str, Tensor]]],
    store: MakeBucket,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, weights = run
    address, out = upload_to(folder, f"{store('merges')}/run"), tmp_path / "out"
    seen = list[set[int | None]]()

    def read_and_look(path: str) -> Any:
        seen.append({batch_of(file.relative_to(downloads).as_posix()) for file in downloads.rglob("*") if file.is_file()})
        return read_record(path)

    downloads = tmp_path / ".out.download"
    monkeypatch.setattr(merge_module, "read_record", read_and_look)
    assert main(["merge", f"{address}/ba10-rank0.pt", f"{address}/ep0-ba20", address, str(out)]) == 0
    assert seen == [{10}, {20}, {40}]
    assert not downloads.exists()
    assert "until it is read" in capsys.readouterr().out
    assert_mean(out, 40, mean_of([weights[0], weights[1], weights[3]], [1 / 3] * 3))


def test_a_damaged_download_leaves_nothing(
    run: tuple[Path, list[dict[str, Tensor]]], s3: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = bucket_for(s3, "damaged-merges")
    address = upload(run[0], bucket, "run")
    flip_a_bit(bucket, "run/ba30-rank0.pt")
    before = sorted(tmp_path.iterdir())
    assert main(["merge", f"{address}/ep0-ba20", f"{address}/ba30-rank0.pt", str(tmp_path / "out")]) == 2
    assert "ba30-rank0.pt is damaged: its hash is not the manifest's" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_half_written_merges_are_never_there(
    run: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(tmp_path.iterdir())

    def fail(content: Any, file: Path) -> None:
        file.write_bytes(b"half")
        assert not (tmp_path / "out").exists()
        raise RuntimeError("PytorchStreamWriter failed writing file")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(UserError, match=r"out: can't be written \(PytorchStreamWriter"):
        merge_checkpoints(paths_of(run[0], 10, 20), tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_bf16_checkpoints_are_merged_in_fp32(dataset: Path, tmp_path: Path) -> None:
    weights = [{name: w.bfloat16() for name, w in each.items()} for each in stored(tmp_path / "x", dataset, (1, 2, 3))]
    for batch, each in enumerate(weights, 1):
        checkpoint_of(network(), tmp_path / "run", dataset / "tokenizer", batch == 2, batch=batch, weights=each)
    merge_checkpoints(paths_of(tmp_path / "run", 1, 2, 3), tmp_path / "out")
    assert_mean(tmp_path / "out", 3, mean_of(weights, [1 / 3] * 3))


def test_equal_checkpoints_give_themselves(dataset: Path, tmp_path: Path) -> None:
    for batch in range(1, 8):
        checkpoint_of(network(), tmp_path / "run", dataset / "tokenizer", False, batch=batch)
    merge_checkpoints(paths_of(tmp_path / "run", *range(1, 8)), tmp_path / "out", weights=[0, 0, 1, 2, 3, 0, 0.1])
    for name, weight in read_weights(str(tmp_path / "out" / "ba7-rank0.pt")).items():
        assert torch.equal(weight, network().state_dict()[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": 40}, "intermediate_size is 48 in "),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_parameters is "),
    ],
)
def test_other_architectures_are_refused(
    dataset: Path, tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = checkpoint_of(network(), tmp_path / "a", dataset / "tokenizer", False)
    second = checkpoint_of(network(**changes), tmp_path / "b", dataset / "tokenizer", True)
    assert main(["merge", str(first), str(second), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"only checkpoints of one architecture and tokenizer can be merged: {message}" in error
    assert str(second) in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_other_tokenizers_are_refused(dataset: Path, tmp_path: Path) -> None:
    other = tmp_path / "tokenizer"
    other.mkdir()
    for file in (dataset / "tokenizer").iterdir():
        (other / file.name).write_text(file.read_text().replace('"w3"', '"z3"'))
    paths = [
        str(checkpoint_of(network(), tmp_path / name, tokenizer, False))
        for name, tokenizer in (("a", dataset / "tokenizer"), ("b", other))
    ]
    with pytest.raises(UserError, match="one architecture and tokenizer can be merged: the tokenizer's hash is "):
        merge_checkpoints(paths, tmp_path / "out")


def test_missing_checkpoints_are_refused(run: tuple[Path, list[dict[str, Tensor]]], tmp_path: Path) -> None:
    folder, out = run[0], tmp_path / "out"
    with pytest.raises(UserError, match=r"expected at least two checkpoints to merge; got .*ba10-rank0\.pt"):
        merge_checkpoints(paths_of(folder, 10), out)
    (folder / "ba30.json").unlink()  # as after an interrupted save, or by `checkpoint.keep`
    with pytest.raises(UserError, match=r"expected 1 complete; got 0 of batches 10, 20, 40 in .*checkpoint.keep_at"):
        merge_checkpoints([*paths_of(folder, 10), str(folder / "ba30-rank0.pt")], out)
    with pytest.raises(UserError, match=r"nothing: expected 1 complete; .*/nothing is not there, or empty"):
        merge_checkpoints([str(folder), str(tmp_path / "nothing")], out)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported/config.json").touch()
    with pytest.raises(UserError, match=r"expected 1 complete; .*/exported holds none \(an export is no checkpoint\)$"):
        merge_checkpoints([str(folder), str(tmp_path / "exported")], out)


def test_weights_equal_a_decay_of_the_learning_rate() -> None:
    """For updates that are only scaled: the mean of checkpoints after each batch, and of some."""
    updates = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    path = torch.cat([torch.zeros(1, 5, dtype=torch.float64), updates.cumsum(0)])
    times = torch.arange(12, dtype=torch.float64) / 12
    factors = {"linear": 1 - times, "1-sqrt": 1 - times.sqrt(), "cosine": 0.5 * (1 + torch.cos(torch.pi * times))}
    for shape, factor in factors.items():
        weights = torch.tensor(merge_weights(shape, range(100, 113)), dtype=torch.float64)
        assert (weights >= 0).all() and weights.sum() == pytest.approx(1)
        torch.testing.assert_close(weights @ path, factor @ updates)
        # Unequal distances: all updates between two checkpoints have their mean rate.
        kept = [0, 2, 3, 9, 12]
        weights = torch.tensor(merge_weights(shape, [100 + batch for batch in kept]), dtype=torch.float64)
        means = [factor[a:b].mean().item() for a, b in pairwise(kept)]
        expected = sum(mean * (path[b] - path[a]) for mean, (a, b) in zip(means, pairwise(kept), strict=True))
        torch.testing.assert_close(weights @ path[kept], expected)
    assert merge_weights("mean", [5, 5]) == [0.5, 0.5]
    assert merge_weights("1, 3", [5, 6]) == merge_weights([2, 6], [5, 6]) == [0.25, 0.75]
    for weights in ("1,2,3", "1,-1", "0,0", "nan,1", "inf,1", "sqrt", [1.0]):
        with pytest.raises(UserError, match="expected 2 numbers of at least 0, or mean, linear, 1-sqrt, cosine"):
            merge_weights(weights, [5, 6])
    with pytest.raises(UserError, match="weights linear: expected checkpoints at increasing batches"):
        merge_weights("linear", [6, 6])


def trained(folder: Path, dataset: Path, config: PretrainConfig, batches: Sequence[int]) -> None:
    """Write checkpoints with the manifests of a run of this configuration."""
    for batch in batches:
        checkpoint_of(network(), folder, dataset / "tokenizer", False, batch=batch)
        manifest = json.loads((folder / f"ba{batch}.json").read_text())
        manifest["run"] |= {"config": config.model_dump(mode="json"), "last_batch": [batch - 1, 0, 0, 0]}
        manifest["run"] |= {"rows": 0, "tokens": 0, "epochs": 0, "phase": "", "overridden": [], "indexes": {}}
        (folder / f"ba{batch}.json").write_text(json.dumps(manifest))


def test_the_last_of_the_stable_phase(dataset: Path, tmp_path: Path, write_yaml: Write) -> None:
    """After warmup (4) and the last switch before the decay, up to the decay's start, whose rate is still the peak."""
    clm, mlm = {"name": "clm", "until": "10ba"}, {"name": "mlm"}
    keys: dict[str, Any] = {"max_duration": "30ba", "schedule__warmup": "4ba", "schedule__decay": "10ba"}
    for name, changes, expected in (
        ("clm", {"objective__phases": [{"name": "clm"}]}, [20, 16, 12, 10, 8, 4]),
        ("switch", {"objective__phases": [clm, mlm]}, [20, 16, 12, 10]),
        ("in-decay", {"objective__phases": [{**clm, "until": "22ba"}, mlm]}, [20, 16, 12, 10, 8, 4]),
        ("at-decay", {"objective__phases": [{**clm, "until": "20ba"}, mlm]}, [20, 16, 12, 10, 8, 4]),
        ("trunk", {"objective__phases": [{"name": "clm"}], "schedule__decay": "0ba"}, [30, 28, 20, 16, 12, 10, 8, 4]),
    ):
        folder = tmp_path / name
        trained(folder, dataset, config_of(write_yaml(name, **{**keys, **changes})), (2, 4, 8, 10, 12, 16, 20, 28, 30))
        assert [manifest.batch for manifest in stable_checkpoints(str(folder))] == expected, name
    out = tmp_path / "out"
    assert main(["merge", str(tmp_path / "switch"), str(out), "--last", "3"]) == 0
    made_of = read_manifest(open_store(str(out)), "ba20.json").run["merged"]
    assert [Path(part["checkpoint"]).name for part in made_of] == [f"ba{batch}-rank0.pt" for batch in (12, 16, 20)]
    with pytest.raises(UserError, match=r"expected 5 complete of its stable phase; got 4 of batches 2, 4, .*\.keep_at"):
        merge_checkpoints([str(tmp_path / "switch")], tmp_path / "more", last=5)


def test_no_run_starts_from_a_merged_checkpoint(dataset: Path, tmp_path: Path, write_yaml: Write) -> None:
    """It has no optimizer state: neither by `start_from`, nor as a run's own."""
    config = config_of(write_yaml("trunk", max_duration="30ba"))
    trained(tmp_path / "run", dataset, config, (4, 8))

    def branch_point(folder: Path) -> tuple[str, Manifest]:
        return ResumeGuard(config.model_copy(update={"start_from": str(folder)})).find_branch_point()

    assert branch_point(tmp_path / "run")[1].batch == 8
    merge_checkpoints(paths_of(tmp_path / "run", 4, 8), tmp_path / "out")
    with pytest.raises(UserError, match=r"ba8 \(it is a mean of checkpoints, without optimizer state: use model.init_from"):
        branch_point(tmp_path / "out")
    plan = ResumeGuard(
        config_of(write_yaml("out", max_duration="30ba", checkpoint__folder=str(tmp_path / "out")))
    ).plan_start()
    assert "holds the checkpoints of another run, out" in str(plan.problem)


MEASURE = """
import sys
from pathlib import Path
import torch.distributed.checkpoint.state_dict_loader
from biphasic.checkpointing import merge
from biphasic.data.tokenizer import load_tokenizer

def resident(name):
    return int(next(line.split()[1] for line in Path("/proc/self/status").open() if line.startswith(name)))

merge.PORTION_BYTES = 8_000_000
load_tokenizer(sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
merge.merge_checkpoints(sys.argv[3:], Path(sys.argv[1]))
print(1000 * (resident("VmHWM") - before))
"""


def test_memory_is_that_of_the_mean(tmp_path: Path, dataset: Path) -> None:
    """The merged weights and portions, whether three or ten checkpoints are merged: 1b's 1.2 billion take about 6 GB."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, num_attention_heads=8,
        max_position_embeddings=32, pad_token_id=None, initializer_range=0.02,
    )  # fmt: skip
    model = from_hf_config(config, seed=0)
    size = sum(parameter.nbytes for parameter in model.parameters())
    assert size > 90_000_000
    paths = [str(checkpoint_of(model, tmp_path, dataset / "tokenizer", bool(b % 2), batch=b)) for b in range(1, 11)]
    del model
    peaks = []
    for count in (3, 10):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / f"out{count}"), str(dataset / "tokenizer")]
        done = subprocess.run([*command, *paths[:count]], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]))
    assert max(peaks) < size + 90_000_000, (peaks, size)
    assert peaks[1] < peaks[0] + 60_000_000, (peaks, size)
