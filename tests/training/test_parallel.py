"""Sharding: the same run on any number of ranks, with any strategy and either form of checkpoint."""

import json
import math
import shutil
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForMaskedLM

from biphasic.commands import main
from biphasic.model.architecture import Architecture
from biphasic.model.language_model import LanguageModel
from biphasic.model.segments import Segments
from biphasic.ranks import COLLECTIVE_SECONDS
from biphasic.training import parallel
from biphasic.training.metrics_file import read_metrics
from conftest import Write
from helpers import attention_on_cpu  # noqa: F401 - kernels for `varlen`
from helpers.backbones import backbone
from helpers.decoders import saved_decoder
from helpers.tiny import config_of, keep_checkpoints_up_to, launch, losses, weights, write_rows

FSDP: dict[str, Any] = {"parallelism__strategy": "fsdp", "data__num_canonical_nodes": 4}


def close(a: list[float], b: list[float], tolerance: float = 1e-5) -> bool:
    return len(a) == len(b) and all(math.isclose(x, y, rel_tol=0, abs_tol=tolerance) for x, y in zip(a, b, strict=True))


def test_a_run_resumes_with_another_number_of_ranks(write_yaml: Write) -> None:
    """At one global batch, across the switch; the loader's order follows nothing but the seed."""
    path = write_yaml("uninterrupted", **FSDP)
    assert launch(path, processes=2).returncode == 0
    uninterrupted = Path(config_of(path).output) / "uninterrupted"
    elastic = uninterrupted.parent / "elastic"
    for batch, processes in ((4, 2), (9, 1), (12, 2)):
        run = launch(path, "run_name=elastic", processes=processes)
        assert run.returncode == 0, run.stderr[-3000:]
        if batch < 12:
            keep_checkpoints_up_to(elastic, batch)
            lines = (elastic / "metrics.jsonl").read_text().splitlines()
            kept = [line for line in lines if f'"batch": {batch + 1},' not in line]
            (elastic / "metrics.jsonl").write_text("\n".join(kept[: batch + 1]) + "\n")
    assert close(losses(elastic), losses(uninterrupted))
    tokens = [entry["tokens"] for entry in read_metrics(elastic / "metrics.jsonl")]
    assert tokens == [entry["tokens"] for entry in read_metrics(uninterrupted / "metrics.jsonl")]
    actual, expected_weights = weights(elastic, 12), weights(uninterrupted, 12)
    assert all(torch.allclose(weight, expected_weights[name], atol=1e-5) for name, weight in actual.items())


def test_a_monolithic_checkpoint_is_loaded_into_fsdp(write_yaml: Write) -> None:
    """From a checkpoint that one process wrote without any sharding; each rank then holds a complete copy (HSDP)."""
    ddp = write_yaml("ddp", data__num_canonical_nodes=4, parallelism__strategy="ddp")
    assert launch(ddp).returncode == 0
    uninterrupted = Path(config_of(ddp).output) / "ddp"
    mixed = uninterrupted.parent / "mixed"
    shutil.copytree(uninterrupted, mixed)
    keep_checkpoints_up_to(mixed, 5)
    path = write_yaml("mixed", **FSDP, parallelism__shard_degree=1)
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    assert close(losses(mixed), losses(uninterrupted))
    # Checkpoints are sharded from here on, and one rank can resume from them.
    assert not (mixed / "checkpoints" / "ba12-rank0.pt").exists()
    keep_checkpoints_up_to(mixed, 8)
    run = launch(write_yaml("mixed", **{**FSDP, "parallelism__strategy": "auto"}), processes=1)
    assert run.returncode == 0, run.stderr[-3000:]
    assert close(losses(mixed), losses(uninterrupted))
    actual, expected_weights = weights(mixed, 12), weights(uninterrupted, 12)
    assert all(torch.allclose(weight, expected_weights[name], atol=1e-5) for name, weight in actual.items())
    refused = launch(write_yaml("mixed", data__num_canonical_nodes=4, parallelism__strategy="ddp"))
    assert refused.returncode == 2
    assert "parallelism.strategy: ddp can't load" in refused.stderr


AOT_EAGER = """
import functools, torch
torch.compile = functools.partial(torch.compile, backend="aot_eager")
"""
"""torch.compile without code generation: graphs, guards and gradients are real, and no C++ is compiled."""


@pytest.mark.parametrize("code", [AOT_EAGER, pytest.param("", marks=pytest.mark.slow)], ids=["aot_eager", "inductor"])
def test_sharded_layers_may_be_compiled_and_recomputed(write_yaml: Write, code: str) -> None:
    keys: dict[str, Any] = {
        "checkpoint__interval": "100ba",
        "objective__phases": [{"name": "clm"}],
        "max_duration": "8ba",
    }
    computing = {"compile": True, "activation_checkpointing": 2}
    for name, more in (("plain", {"data__num_canonical_nodes": 4}), ("compiled", {**FSDP, "compute": computing})):
        run = launch(write_yaml(name, **keys, **more), processes=1 + (name == "compiled"), code=code)
        assert run.returncode == 0, run.stderr[-3000:]
        assert name == "plain" or "layers and loss compiled (1 of 2 layers recomputed)" in run.stdout
    runs = Path(config_of(write_yaml("plain", **keys)).output)
    assert close(losses(runs / "compiled"), losses(runs / "plain"))


def test_modernbert_is_sharded_and_compiled(write_yaml: Write, tmp_path: Path) -> None:
    """With its head's layers, biases and tied weight, over the switch; the sharded checkpoint is exported."""
    saved_decoder("modernbert", tmp_path / "model", num_hidden_layers=3)
    keys = {"model": {"init_from": str(tmp_path / "model")}, "max_duration": "8ba", "schedule__decay": "2ba"}
    keys |= {"objective__phases": [{"name": "clm", "until": "4ba"}, {"name": "mlm"}], "checkpoint__interval": "8ba"}
    for name, more in (
        ("plain", {"data__num_canonical_nodes": 4}),
        ("compiled", {**FSDP, "compute": {"compile": True, "activation_checkpointing": 2}}),
    ):
        run = launch(write_yaml(name, **keys, **more), processes=1 + (name == "compiled"), code=AOT_EAGER)
        assert run.returncode == 0, run.stderr[-3000:]
    runs = Path(config_of(write_yaml("plain", **keys)).output)
    assert close(losses(runs / "compiled"), losses(runs / "plain"))
    networks = []
    for name in ("plain", "compiled"):
        assert main(["export", str(runs / name / "checkpoints"), str(tmp_path / name)]) == 0
        networks.append(AutoModelForMaskedLM.from_pretrained(tmp_path / name).state_dict())
    assert {"head.dense.weight", "decoder.bias"} <= networks[0].keys()
    for name, weight in networks[0].items():
        torch.testing.assert_close(networks[1][name], weight, atol=1e-5, rtol=1e-4)


@pytest.fixture
def group() -> Iterator[None]:
    # A run in this process may have made a group already.
    own = not torch.distributed.is_initialized()
    if own:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if own:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_collectives_of_sharded_layers() -> None:
    """Each layer but the last gathers the next one's weights; gloo, which has no averages, is asked for sums.

    Layers are sharded again after the forward pass, other weights not, whatever Composer has set.
    """
    layers = [fully_shard(torch.nn.Linear(2, 2), reshard_after_forward=True) for _ in range(3)]
    model = fully_shard(torch.nn.Sequential(*layers, torch.nn.Linear(2, 2)), reshard_after_forward=True)
    parallel.set_collectives(model, [*layers, torch.nn.Linear(2, 2)])
    following = [layer._get_fsdp_state()._states_to_forward_prefetch for layer in layers]  # pyright: ignore
    assert following == [[layers[1]._get_fsdp_state()], [layers[2]._get_fsdp_state()], []]  # pyright: ignore
    states = [vars(module._get_fsdp_state()) for module in (*layers, model)]  # pyright: ignore
    # In torch 2.11 a state has one group, under another name.
    groups = [group for state in states for group in state.get("_fsdp_param_groups") or [state["_fsdp_param_group"]]]
    assert len(groups) == 4 and all(group.force_sum_reduction_for_comms for group in groups)
    assert [group.post_forward_mesh_info is None for group in groups] == [False, False, False, True]


@pytest.mark.usefixtures("group")
def test_groups_of_a_mesh_get_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """And TF32 is off again, which a device that Composer makes for FSDP2 turns on."""
    devices: list[str] = []
    monkeypatch.setattr(parallel, "rank_device", lambda: devices.append("without TF32"))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    callback = parallel.ShardedModel([])
    state = SimpleNamespace(device_mesh=mesh, model=torch.nn.Linear(2, 2), fsdp_config=None)
    for group in mesh.get_all_groups():
        group.set_timeout(timedelta(seconds=7))
    callback.after_load(state, None)  # pyright: ignore[reportArgumentType]
    seconds = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in mesh.get_all_groups()]
    assert seconds == [COLLECTIVE_SECONDS] * 2 and devices == ["without TF32"]


@pytest.mark.usefixtures("group")
def test_a_sharded_bf16_model_sums_its_layers_in_fp32() -> None:
    """As autocast alone does: FSDP2 gathers bf16 weights, and rounds neither hidden states nor rotary tables to them."""
    model = LanguageModel(backbone("llama"), torch.nn.Linear(32, 97, bias=False))
    layers: list[torch.nn.Module] = list(model.backbone.layers)  # pyright: ignore[reportArgumentType]
    model.backbone.attention_backend = "varlen"  # pyright: ignore[reportAttributeAccessIssue]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    parallel.keep_inputs(model)
    segments, calls = Segments.of((5, 16), torch.device("cpu")), []

    def record(layer: torch.nn.Module, hidden: tuple[torch.Tensor], named: dict[str, Any]) -> None:
        rotary: tuple[torch.Tensor, ...] = named["position_embeddings"]
        calls.append({hidden[0].dtype, *(table.dtype for table in rotary)})
        assert named["segments"] is segments

    for layer in layers:
        layer.register_forward_pre_hook(record, with_kwargs=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.arange(21), torch.arange(21), segments, True)[0].backward()
    assert calls == [{torch.float32}] * 3


def test_initial_weights_and_validation_don_t_depend_on_the_ranks(write_yaml: Write, tmp_path: Path) -> None:
    """The second rank builds on the meta device and receives the first one's. It lacks a row of the validation."""
    write_rows(tmp_path / "odd", 20, seed=2)
    index = json.loads((tmp_path / "odd" / "index.json").read_text())
    assert sum(shard["samples"] for shard in index["shards"]) % 2
    still: dict[str, Any] = {"max_duration": "1ba", "objective__phases": [{"name": "clm"}],
                             "schedule__warmup": "0ba", "schedule__decay": "0ba", "optimizer__lr": 1e-30,
                             "data__validation": {"local": str(tmp_path / "odd")}}  # fmt: skip
    again = {**FSDP, "compute__activation_checkpointing": "all"}
    for name, processes, keys in (
        ("plain", 1, {"data__num_canonical_nodes": 4}),
        ("meta", 2, FSDP),
        ("saved", 2, again),
    ):
        run = launch(write_yaml(name, **still, **keys), processes=processes)
        assert run.returncode == 0, run.stderr[-3000:]
    runs = Path(config_of(write_yaml("plain", **still)).output)
    plain = weights(runs / "plain", 1)
    for name in ("meta", "saved"):
        other = weights(runs / name, 1)
        assert plain.keys() == other.keys()
        assert all(torch.equal(weight, other[key]) for key, weight in plain.items())
        assert close(losses(runs / name), losses(runs / "plain"))
        assert close(validation_losses(runs / name), validation_losses(runs / "plain"))


def validation_losses(folder: Path) -> list[float]:
    [line] = [line for line in read_metrics(folder / "metrics.jsonl") if "metrics/clm/loss" in line]
    return [line["metrics/clm/loss"], line["metrics/mlm/loss"]]


SIZE = Architecture(128_256, hidden=1728, ffn=5120, layers=28, heads=18, kv_heads=6, head_dim=96)


@pytest.mark.parametrize(
    ("memory", "ranks", "expected"),
    [
        (None, 8, "ddp"),
        (80 << 30, 8, "ddp"),
        (50 * 10**9, 1, "ddp"),
        (50 * 10**9, 2, "fsdp"),  # DDP's buckets hold the gradients once more
        (40 << 30, 1, "fsdp"),
    ],
)
def test_auto_depends_on_the_size_of_the_states(
    monkeypatch: pytest.MonkeyPatch, memory: int | None, ranks: int, expected: str
) -> None:
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: ranks)
    # Another node's GPUs are larger than this one's; the smallest one decides on all ranks.
    monkeypatch.setattr(parallel.dist, "all_gather_object", lambda value: [200 << 30, value])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: memory is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("Device", (), {"total_memory": memory}))
    assert parallel.choose_strategy("auto", SIZE, None) == expected
    assert parallel.choose_strategy("auto", SIZE, "ba5-rank0.pt") == expected
    assert parallel.choose_strategy("auto", SIZE, "ep0-ba5") == "fsdp"


@pytest.mark.parametrize("degree", ["all", "node"])
def test_the_configuration_has_the_mesh_s_degrees(monkeypatch: pytest.MonkeyPatch, degree: str) -> None:
    """Of 16 ranks on two machines."""
    monkeypatch.setattr(parallel.dist, "get_world_size", lambda: 16)
    monkeypatch.setattr(parallel.dist, "get_local_world_size", lambda: 8)
    made = parallel.parallelism_config("fsdp", degree, monolithic=False)
    fsdp: Any = (made or {})["fsdp"]
    # Composer makes its mesh from these; without them it would make a flat one, in silence.
    degrees = fsdp.data_parallel_shard_degree, fsdp.data_parallel_replicate_degree
    assert degrees == ((16, None) if degree == "all" else (8, 2))
    assert fsdp.reshard_after_forward
    assert fsdp.mixed_precision == "DEFAULT" and fsdp.state_dict_type == "sharded"
