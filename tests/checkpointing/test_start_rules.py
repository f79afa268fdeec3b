"""Where a run starts, from manifests and the indexes of its data."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from biphasic.checkpointing.manifest import Manifest, StoredCheckpoint, read_manifest
from biphasic.checkpointing.start_rules import (
    ResumeGuard,
    checkpoint_folder,
    recorded_config,
    require_same,
)
from biphasic.config.base import flatten
from biphasic.config.load import dump
from biphasic.config.plan import StartPlan, plan
from biphasic.config.pretrain import PretrainConfig
from biphasic.data.streams import index_hashes
from biphasic.errors import UserError
from biphasic.preflight import disk_needs
from biphasic.storage import open_store
from conftest import Write
from helpers.tiny import ROOT, config_of

CLM: list[dict[str, Any]] = [{"name": "clm"}]
STABLE = {"warmup": "3ba"}
BATCH_TOKENS = 240
"""Tokens in a batch of 256 positions."""


def write_manifests(config: PretrainConfig, *batches: int, folder: Path | None = None, on_its_data: bool = False) -> Path:
    """Write the manifests of a run that has trained so far; their checkpoints have no files."""
    folder = folder or Path(config.checkpoint_destination)
    folder.mkdir(parents=True, exist_ok=True)
    indexes = index_hashes(config.streams) if on_its_data else {"data.train.index": "x"}
    for batch in batches:
        counts = {"rows": 8 * batch, "tokens": BATCH_TOKENS * batch, "epochs": 0}
        last = [batch - 1, 8 * (batch - 1), BATCH_TOKENS * (batch - 1), 0]
        recorded = {"config": config.model_dump(mode="json"), "indexes": indexes, "overridden": []}
        manifest = Manifest(
            batch, f"ba{batch}-rank0.pt", {}, {"name": config.run_name, **recorded, **counts, "last_batch": last}
        )
        (folder / manifest.name).write_bytes(manifest.to_bytes())
    return folder


def test_a_run_s_folder_is_found_from_any_directory(
    write_yaml: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative `checkpoint.folder` in its config.yaml is that of the directory in which the run was started."""
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    for folder, expected in {
        "runs/run/checkpoints": str(run / "checkpoints"),
        "./runs/run/checkpoints/": str(run / "checkpoints"),
        "elsewhere": "elsewhere",
        "s3://bucket/runs/run/checkpoints": "s3://bucket/runs/run/checkpoints",
    }.items():
        config = config_of(write_yaml(output="runs", checkpoint__folder=folder))
        (run / "config.yaml").write_text(dump(config))
        assert checkpoint_folder(str(run)) == expected


def branch_point(path: Path | str, config: PretrainConfig) -> int:
    return ResumeGuard(config.model_copy(update={"start_from": str(path)})).find_branch_point()[1].batch


def test_the_newest_checkpoint_of_the_same_past_is_taken(write_yaml: Write) -> None:
    trunk = config_of(write_yaml("trunk", max_duration="30ba", objective__phases=CLM, schedule=STABLE))
    folder = write_manifests(trunk, 5, 10, 15, 20)
    switch = [{"name": "clm", "until": "15ba"}, {"name": "mlm"}]
    config = config_of(write_yaml("switch", max_duration="40ba", objective__phases=switch, schedule=STABLE))
    # The folder of checkpoints, the run's folder, one checkpoint.
    assert branch_point(folder, config) == branch_point(folder.parent, config) == 15
    assert branch_point(folder / "ba10-rank0.pt", config) == 10
    # Something is left to train.
    assert (
        branch_point(folder, config_of(write_yaml("trunk", max_duration="15ba", objective__phases=CLM, schedule=STABLE)))
        == 10
    )
    # An incomplete one is passed over.
    (folder / "ba15.json").unlink()
    (folder / "ba15-rank0.pt").write_bytes(b"")
    assert branch_point(folder, config) == 10
    # So is one of a run whose past isn't its configuration's.
    content = json.loads((folder / "ba10.json").read_text())
    content["run"]["overridden"] = ["optimizer.lr"]
    (folder / "ba10.json").write_text(json.dumps(content))
    assert branch_point(folder, config) == 5
    with pytest.raises(UserError, match=r"ba10 \(that run changed optimizer.lr when it resumed, with resume_overrides\)"):
        branch_point(folder / "ba10-rank0.pt", config)


def test_times_in_tokens_are_compared_with_the_tokens_of_the_checkpoint(write_yaml: Write) -> None:
    """Rows have padding, so the switch is later than batch 10, where 2,560 positions end."""

    def phases(first: str) -> list[dict[str, Any]]:
        return [{"name": "clm", "until": first}, {"name": "mlm"}]

    keys: dict[str, Any] = {"max_duration": "9000tok", "schedule": STABLE}
    trunk = config_of(write_yaml("trunk", **keys, objective__phases=phases("5000tok")))
    folder = write_manifests(trunk, *range(5, 15))
    config = config_of(write_yaml("branch", **keys, objective__phases=phases("2560tok")))
    # Batch 10 begins at 2,400 tokens, batch 11 at 2,640.
    assert branch_point(folder, config) == 11


def test_without_a_checkpoint_of_the_same_past_the_difference_is_named(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"objective__phases": CLM, "schedule": STABLE}
    trunk = config_of(write_yaml("trunk", max_duration="30ba", **keys))
    folder = write_manifests(trunk, 10, 20)
    (folder / "ba25-rank0.pt").write_bytes(b"")
    early = config_of(
        write_yaml("early", **{**keys, "objective__phases": [{"name": "clm", "until": "4ba"}, {"name": "mlm"}]})
    )
    with pytest.raises(UserError) as refused:
        branch_point(folder, early)
    assert str(refused.value) == (
        f"start_from: {folder}: no checkpoint there has the same past as this run: the two differ from batch 4 on "
        "(objective.phases.0.until is the end there, 4ba here). Complete checkpoints there: ba20, ba10; "
        "not usable: ba25 (it has no ba25.json, so it was not finished)"
    )
    with pytest.raises(UserError, match=r"this run ends \(10ba\) before or at every checkpoint there: ba20, ba10"):
        branch_point(folder, config_of(write_yaml("short", max_duration="10ba", **keys)))
    with pytest.raises(UserError, match=r"nothing: it holds no checkpoint"):
        branch_point(folder / "nothing", early)
    with pytest.raises(UserError, match=r"no usable checkpoint there \(ba25 \(it has no ba25.json"):
        branch_point(folder / "ba25-rank0.pt", early)
    with pytest.raises(UserError, match=r"there is no ba7.json"):
        branch_point(folder / "ba7-rank0.pt", early)


def test_a_configuration_of_another_version_is_refused(write_yaml: Write) -> None:
    config = config_of(write_yaml())
    folder = write_manifests(config, 4)
    content = json.loads((folder / "ba4.json").read_text())
    content["run"]["config"]["schedule"]["decay_from"] = None
    (folder / "ba4.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"^ba4.json: the run's configuration can't be read \(config.schedule.decay_from: "):
        recorded_config(read_manifest(open_store(str(folder)), "ba4.json"))


@pytest.mark.parametrize("name", ["1b_biphasic", "210m_mlm", "quickstart"])
def test_a_recorded_configuration_reads_back(name: str, tmp_path: Path) -> None:
    config = config_of(ROOT / "yamls" / f"{name}.yaml")
    folder = write_manifests(config, 4, folder=tmp_path)
    assert recorded_config(read_manifest(open_store(str(folder)), "ba4.json")) == config


def test_overrides_let_the_past_differ(write_yaml: Write) -> None:
    config = config_of(write_yaml())
    folder = write_manifests(config, 4)
    manifest = read_manifest(open_store(str(folder)), "ba4.json")
    phases = [{"name": "clm", "until": "2ba"}, {"name": "mlm"}]
    for key, value, override in [
        ("objective__phases", phases, "objective"),
        ("objective__phases", phases, "objective.phases.0.until"),
        ("optimizer__lr", 1e-3, "optimizer"),
        ("schedule__warmup", "2ba", "schedule.warmup"),
        ("model__hidden_size", 48, "model.hidden_size"),
    ]:
        with pytest.raises(UserError, match=key.replace("__", ".")):
            ResumeGuard(config_of(write_yaml(**{key: value}))).require_same_past(manifest, {"data.train.index": "x"})
        changed = ResumeGuard(config_of(write_yaml(**{key: value}, checkpoint__resume_overrides=[override])))
        changed.require_same_past(manifest, {"data.train.index": "x"})
        with pytest.raises(UserError, match=r"data.train.index: 'x' until now, 'y' here"):
            changed.require_same_past(manifest, {"data.train.index": "y"})


def test_everything_that_has_changed_is_named(write_yaml: Write) -> None:
    """Keys that hold for every batch, and the index of each stream."""
    folder = write_manifests(config_of(write_yaml()), 4)
    manifest = read_manifest(open_store(str(folder)), "ba4.json")
    changed = config_of(write_yaml(seed=8, data__shuffle_block_size=9))
    guard = ResumeGuard(changed)
    with pytest.raises(UserError) as refused:
        guard.require_same_past(manifest, {"data.mix.more.index": "y"})
    keys = ["data.shuffle_block_size", "seed", "data.mix.more.index", "data.train.index"]
    assert str(refused.value).splitlines() == [
        "run: its checkpoint ba4-rank0.pt was trained with another configuration:",
        "  data.shuffle_block_size: 64 until now, 9 here",
        "  seed: 7 until now, 8 here",
        "  data.mix.more.index: 'nothing' until now, 'y' here",
        "  data.train.index: 'x' until now, 'nothing' here",
        "restore the earlier values, choose another run_name (start_from can use the common part), or allow the difference: "
        f"checkpoint.resume_overrides=[{', '.join(keys)}]",
    ]
    manifest.run["overridden"] = ["precision"]
    assert guard.overridden_keys(manifest, {"data.train.index": "x"}) == [*keys[:1], "precision", "seed"]
    assert guard.overridden_keys(manifest, {"data.train.index": "y"})[1] == "data.train.index"
    path = "runs/one/ba4-rank0.pt"
    guard.require_rows_of_branch_point(path, manifest, {"data.train.index": "x"})
    message = "start_from: runs/one/ba4-rank0.pt was trained on other rows: data.train.index is 'x' there, 'y' here"
    with pytest.raises(UserError, match=f"^{message}$"):
        guard.require_rows_of_branch_point(path, manifest, {"data.train.index": "y"})
    # Either the name or the configuration makes it the same run.
    stored = StoredCheckpoint(4, manifest)
    for config in (changed, recorded_config(manifest).model_copy(update={"run_name": "named"})):
        assert list(ResumeGuard(config).own_checkpoints([stored])) == [stored]
    checkpoints = ResumeGuard(changed.model_copy(update={"run_name": "named"})).own_checkpoints([stored])
    assert next(checkpoints) == StoredCheckpoint(4, None, "it belongs to another run, run")
    with pytest.raises(UserError, match="holds the checkpoints of another run, run: choose another folder"):
        next(checkpoints)


def test_a_share_that_moves_is_explained(write_yaml: Write) -> None:
    def lines(**keys: Any) -> list[str]:
        guard = ResumeGuard(config_of(write_yaml(schedule=STABLE, **keys)))
        with pytest.raises(UserError) as refused:
            guard.require_same_past(manifest, {"data.train.index": "x"})
        return str(refused.value).splitlines()[1:-1]

    phases = [{"name": "clm", "until": "0.5dur"}, {"name": "mlm"}]
    folder = write_manifests(config_of(write_yaml(max_duration="20ba", objective__phases=phases, schedule=STABLE)), 15)
    manifest = read_manifest(open_store(str(folder)), "ba15.json")
    start = "  objective.phases.0.until: 10ba (0.5dur of 20ba) until now, "
    assert lines(max_duration="24ba", objective__phases=phases) == [f"{start}12ba (0.5dur of 24ba) here, from batch 10 on"]
    phases = [{"name": "clm", "until": "12ba"}, {"name": "mlm"}]
    assert lines(max_duration="20ba", objective__phases=phases) == [f"{start}12ba here, from batch 10 on"]


def test_many_checkpoints_are_not_all_listed(write_yaml: Write) -> None:
    keys: dict[str, Any] = {"objective__phases": CLM, "schedule": STABLE}
    folder = write_manifests(config_of(write_yaml("trunk", max_duration="30ba", **keys)), *range(12, 18))
    short = config_of(write_yaml("short", max_duration="12ba", **keys))
    with pytest.raises(UserError, match=r"checkpoint there: ba17, ba16, ba15, …, ba12$"):
        branch_point(folder, short)
    (folder / "ba17.json").unlink()
    with pytest.raises(UserError, match=r"checkpoint there: ba16, ba15, ba14, ba13, ba12$"):
        branch_point(folder, short)
    content = json.loads((folder / "ba16.json").read_text())
    content["run"]["overridden"] = ["optimizer.lr", "seed"]
    (folder / "ba16.json").write_text(json.dumps(content))
    with pytest.raises(
        UserError, match=r"usable checkpoint there \(ba16 \(that run changed optimizer.lr, seed when it resumed"
    ):
        branch_point(folder / "ba16-rank0.pt", short)


def test_the_plan_says_where_the_run_starts(write_yaml: Write, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"objective__phases": CLM, "schedule": STABLE}
    assert ResumeGuard(config_of(write_yaml("new", **keys))).plan_start() == StartPlan(0, None, "new weights")
    continued = config_of(write_yaml("continued", **keys, model={"init_from": "org/encoder"}))
    assert ResumeGuard(continued).plan_start() == StartPlan(0, None, "the weights of org/encoder")
    trunk = config_of(write_yaml("trunk", max_duration="30ba", **keys))
    folder = write_manifests(trunk, 10, 20, on_its_data=True)
    path = write_yaml(
        "branch", max_duration="24ba", **{**keys, "schedule": {**STABLE, "decay": "8ba"}}, start_from=str(folder)
    )
    start = ResumeGuard(config_of(path)).plan_start()
    # The rate is still the trunk's in the decay's first batch, 16.
    assert (start.batch, start.checkpoint) == (10, str(folder / "ba10-rank0.pt"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    code = "import sys, main; main.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code, str(path), "--plan"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    expected = f"start          batch 10, from {folder}/ba10-rank0.pt, of trunk, by start_from: 14 of 24 batches are trained"
    assert expected in run.stdout
    # The batches before the branch point are saved by the trunk.
    assert f"checkpoints    14 in {config_of(path).checkpoint_destination}, every 1ba" in run.stdout
    own, each = config_of(path).local_checkpoints, plan(trunk, 1).details["checkpoints"]["bytes_each"]
    assert disk_needs(config_of(path)) == [(own, 14 * each)]
    # Its own checkpoint comes first.
    write_manifests(config_of(path), 12, on_its_data=True)
    newest = f"{config_of(path).checkpoint_destination}/ba12-rank0.pt"
    assert ResumeGuard(config_of(path)).plan_start() == StartPlan(12, newest, "its own newest checkpoint")
    # A share that moves the end of a phase that is done.
    phases = [{"name": "clm", "until": "0.5dur"}, {"name": "mlm"}]
    shorter = config_of(write_yaml("share", max_duration="20ba", objective__phases=phases, schedule=STABLE))
    write_manifests(shorter, 15, on_its_data=True)
    longer = ResumeGuard(
        config_of(write_yaml("share", max_duration="24ba", objective__phases=phases, schedule=STABLE))
    ).plan_start()
    assert longer.batch is None and longer.problem is not None
    assert "objective.phases.0.until: 10ba (0.5dur of 20ba) until now, 12ba (0.5dur of 24ba) here" in longer.problem
    # Nothing but another run's: the run would refuse to write there.
    foreign = ResumeGuard(
        config_of(write_yaml("third", **{**keys, "optimizer__lr": 1e-3}, checkpoint__folder=str(folder)))
    ).plan_start()
    assert "holds the checkpoints of another run, trunk" in (foreign.problem or "")


def test_a_plan_refuses_a_start_from_as_the_start_does(
    write_yaml: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"objective__phases": CLM, "schedule": STABLE}
    folder = write_manifests(config_of(write_yaml("trunk", max_duration="30ba", **keys)), 10, 20)

    def planned(start_from: Path | str, **changed: Any) -> tuple[list[str], list[str], list[str]]:
        config = config_of(write_yaml("branch", **{"max_duration": "24ba", **keys, **changed}, start_from=str(start_from)))
        start = ResumeGuard(config).plan_start()
        with pytest.raises(UserError) as refused:
            ResumeGuard(config).find_branch_point()
        assert str(refused.value) in (start.problem, start.missing, start.unknown)
        run_plan = plan(config, 1, start=start)
        return run_plan.problems, run_plan.missing, run_plan.warnings

    other, missing, warnings = planned(folder, seed=8)
    assert "the two differ from batch 0 on (seed is" in other[0] and not missing and not warnings
    assert "this run ends (10ba) before or at every checkpoint there" in planned(folder, max_duration="10ba")[0][0]
    assert "holds no checkpoint" in planned(tmp_path / "nothere")[0][0]
    # Another run may be about to save there.
    monkeypatch.chdir(tmp_path)
    problems, missing, _ = planned("runs/later")
    assert not problems and "start_from: runs/later: it holds no checkpoint" in missing[0]


def test_a_plan_compares_the_rows_as_the_start_does(write_yaml: Write, tmp_path: Path) -> None:
    """Those of a bucket are compared when the run starts."""
    keys: dict[str, Any] = {"objective__phases": CLM, "schedule": STABLE}
    trunk = config_of(write_yaml("trunk", max_duration="30ba", **keys))
    folder = write_manifests(trunk, 10, on_its_data=True)
    copy = shutil.copytree(trunk.streams["data.train"].local, tmp_path / "copy")
    paths = [write_yaml(name, max_duration="30ba", **keys, data__train__local=str(copy), start_from=start_from)
             for name, start_from in (("trunk", None), ("branch", str(folder)))]  # fmt: skip
    own, branch = map(config_of, paths)
    assert [ResumeGuard(config).plan_start().batch for config in (own, branch)] == [10, 10]
    with (copy / "index.json").open("a") as file:
        file.write(" ")
    manifest, indexes = read_manifest(open_store(str(folder)), "ba10.json"), index_hashes(own.streams)
    with pytest.raises(UserError, match=r"data\.train\.index: '.*' until now") as resumed:
        ResumeGuard(own).require_same_past(manifest, indexes)
    with pytest.raises(UserError, match=r"ba10-rank0\.pt was trained on other rows: data\.train\.index is") as branched:
        ResumeGuard(branch).require_rows_of_branch_point(str(folder / "ba10-rank0.pt"), manifest, indexes)
    assert ResumeGuard(own).plan_start() == StartPlan(problem=str(resumed.value))
    assert ResumeGuard(branch).plan_start() == StartPlan(problem=str(branched.value))
    shutil.rmtree(copy)  # what is missing, other checks report
    assert [ResumeGuard(config).plan_start().batch for config in (own, branch)] == [10, 10]


def test_the_place_in_the_data_is_not_lost(write_yaml: Write) -> None:
    """It is counted in batches of the phases so far, which no override may change."""
    allowed: dict[str, Any] = {"checkpoint__resume_overrides": ["objective", "global_batch_size"]}
    switch = [{"name": "clm", "until": "3ba"}, {"name": "mlm", "global_batch_size": 16}]
    split = [{"name": "clm", "until": "1ba"}, {"name": "clm", "until": "3ba"}, switch[1]]
    for before, after in (
        ({}, {"global_batch_size": 16}),
        ({"objective__phases": switch}, {"objective__phases": split}),
    ):
        folder = write_manifests(config_of(write_yaml(**before)), 4)
        manifest = read_manifest(open_store(str(folder)), "ba4.json")
        with pytest.raises(UserError, match=r"the run's place in the data would be lost, also with checkpoint\.resume_over"):
            ResumeGuard(config_of(write_yaml(**after, **allowed))).require_same_past(manifest, {"data.train.index": "x"})
    # Another size from here on.
    folder = write_manifests(config_of(write_yaml(objective__phases=CLM)), 4)
    manifest = read_manifest(open_store(str(folder)), "ba4.json")
    phases = [{"name": "clm", "until": "4ba"}, {"name": "clm", "global_batch_size": 16}]
    ResumeGuard(config_of(write_yaml(objective__phases=phases))).require_same_past(manifest, {"data.train.index": "x"})


def require_same_configuration(first: PretrainConfig, own: PretrainConfig) -> None:
    require_same(dict(flatten(first)), dict(flatten(own)), 1, "give all nodes the same YAML and overrides")


def test_nodes_have_the_same_configuration_and_rows(write_yaml: Write, tmp_path: Path) -> None:
    first = config_of(write_yaml())
    other = config_of(write_yaml(output=str(tmp_path / "other"), data__train__local="/data/train"))
    require_same_configuration(first, other)
    with pytest.raises(UserError, match=r"^node 1: optimizer.lr is 0.001 there, and 0.005 on node 0: give all nodes"):
        require_same_configuration(first, config_of(write_yaml(optimizer__lr=1e-3)))
    ramp = [{"name": "mlm", "masking_ratio": {"start": 0.5, "end": 0.15}}]
    for one, other, key in (
        ({"objective__phases": ramp}, {"objective__phases": [{"name": "mlm"}]}, "objective.phases.0.masking_ratio"),
        ({"checkpoint__keep_at": ["5ba"]}, {}, "checkpoint.keep_at.0"),
        ({"start_from": "runs/a"}, {}, "start_from"),
    ):
        configs = [config_of(write_yaml(**keys)) for keys in (one, other)]
        for node_0, node_1 in (configs, configs[::-1]):
            with pytest.raises(UserError, match=rf"^node 1: {key}.* is .* there, and .* on node 0"):
                require_same_configuration(node_0, node_1)
    rows = "the rows are not the same"
    with pytest.raises(UserError, match=r"data.validation.index is None there"):
        require_same({"data.train.index": "x", "data.validation.index": "y"}, {"data.train.index": "x"}, 1, rows)
    require_same({"data.train.index": "x"}, {"data.train.index": "x"}, 1, rows)
    with pytest.raises(UserError, match=r"^node 1: data.train.index is y there, and x on node 0: the rows are not"):
        require_same({"data.train.index": "x"}, {"data.train.index": "y"}, 1, rows)
