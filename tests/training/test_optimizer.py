"""AdamW as the YAML says, and Muon for matrices beside it."""

import copy
import shutil
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from biphasic.config.pretrain import OptimizerConfig
from biphasic.training.metrics_file import read_metrics
from biphasic.training.optimizer import MuonWithAdamW, build_optimizer
from conftest import Write
from helpers.tiny import config_of, keep_checkpoints_up_to, launch, losses, train, train_alone, weights

VALUES: dict[str, Any] = {"lr": 0.1, "betas": [0.5, 0.6], "eps": 0.01, "weight_decay": 0.2}


def test_adamw_has_the_yaml_s_values() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(module, module, "adamw", **OptimizerConfig(**VALUES).adam)
    [group] = optimizer.param_groups
    assert all(starmap(torch.equal, zip(group["params"], module.parameters(), strict=True)))
    values = VALUES | {"betas": (0.5, 0.6), "fused": True}
    assert {name: group[name] for name in values} == values


def a_model() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    backbone = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))
    return torch.nn.ModuleDict({"backbone": backbone, "head": torch.nn.Linear(6, 5)})


def step(model: torch.nn.ModuleDict, *optimizers: torch.optim.Optimizer, seed: int) -> None:
    """Give every parameter a gradient and take a step."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    for optimizer in optimizers:
        optimizer.step()


def test_muon_updates_the_layers_matrices_and_adamw_the_rest() -> None:
    """As two optimizers of PyTorch would, also after a checkpoint was loaded into a new optimizer."""
    config = OptimizerConfig(name="muon", **VALUES)
    model, reference = a_model(), a_model()
    matrix: Any = reference["backbone"][1].weight  # pyright: ignore[reportIndexIssue]
    muon = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw")
    others = [parameter for parameter in reference.parameters() if parameter is not matrix]
    adamw = torch.optim.AdamW(others, lr=0.1, betas=(0.5, 0.6), eps=0.01, weight_decay=0.2, fused=True)
    optimizer = build_optimizer(model, model["backbone"], config.name, **config.adam)
    assert isinstance(optimizer, MuonWithAdamW)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 6]
    for seed in range(2):
        step(model, optimizer, seed=seed)
        step(reference, muon, adamw, seed=seed)
    stored = copy.deepcopy(optimizer.state_dict())
    optimizer = build_optimizer(model, model["backbone"], config.name, **config.adam)
    optimizer.load_state_dict(stored)
    for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
        group["lr"] = 0.05
    step(model, optimizer, seed=2)
    step(reference, muon, adamw, seed=2)
    for name, weight in reference.state_dict().items():
        assert torch.equal(model.state_dict()[name], weight), name


def test_a_run_with_muon_resumes_bit_for_bit(write_yaml: Write) -> None:
    """At the switch too, where the second phase resets the optimizer."""
    phases = [{"name": "clm", "until": "6ba"}, {"name": "mlm", "reset_optimizer": True}]
    keys: dict[str, Any] = {"optimizer__name": "muon", "objective__phases": phases}
    uninterrupted = train_alone(write_yaml("uninterrupted", **keys))
    expected = losses(uninterrupted)
    assert expected != losses(train(config_of(write_yaml("adamw", objective__phases=phases))))
    lines = read_metrics(uninterrupted / "metrics.jsonl")
    assert lines[-1]["lr-MuonWithAdamW/group0"] == lines[-1]["lr-MuonWithAdamW/group1"] > 0
    for batch in (4, 6):
        path = write_yaml(f"from{batch}", **keys)
        folder = config_of(path).run_folder
        shutil.copytree(uninterrupted, folder)
        keep_checkpoints_up_to(folder, batch)
        (folder / "metrics.jsonl").unlink()
        train_alone(path)
        assert losses(folder) == expected[batch:]
        assert all(torch.equal(weight, weights(folder, 12)[name]) for name, weight in weights(uninterrupted, 12).items())


def test_muon_over_shards_equals_muon_over_whole_matrices(write_yaml: Write) -> None:
    """Also resumed: bit for bit on as many ranks, and as docs/checkpoints.md says on another number.

    Muon orthogonalizes in bf16, which makes rounding differences between ranks larger: DDP on two ranks differs as much. If
    each rank orthogonalized only its shard, losses would differ by 2.5e-3.
    """
    keys: dict[str, Any] = {"optimizer__name": "muon", "data__num_canonical_nodes": 4}
    run = launch(write_yaml("whole", **keys))
    assert run.returncode == 0, run.stderr[-3000:]
    path = write_yaml("sharded", **keys, parallelism__strategy="fsdp")
    whole, sharded = (Path(config_of(path).output) / name for name in ("whole", "sharded"))
    run = launch(path, processes=2)
    assert run.returncode == 0, run.stderr[-3000:]
    two_ranks, two_ranks_weights = losses(sharded), weights(sharded, 12)
    torch.testing.assert_close(two_ranks, losses(whole), atol=0, rtol=4e-5)
    for ranks in (2, 1):
        keep_checkpoints_up_to(sharded, 9)
        (sharded / "metrics.jsonl").unlink()
        run = launch(path, processes=ranks)
        assert run.returncode == 0, run.stderr[-3000:]
        if ranks == 2:
            assert losses(sharded) == two_ranks[9:]
            assert all(torch.equal(weight, two_ranks_weights[name]) for name, weight in weights(sharded, 12).items())
    torch.testing.assert_close(losses(sharded), losses(whole)[9:], atol=0, rtol=4e-5)
    expected = weights(whole, 12)
    for name, weight in weights(sharded, 12).items():
        torch.testing.assert_close(weight, expected[name], atol=3e-3, rtol=0)
