"""The tree of shared beginnings: histories are texts, a letter for each batch, so that any test can be followed by eye."""

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from biphasic.checkpointing.manifest import Manifest
from biphasic.config.load import load
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.errors import UserError
from biphasic.study.state import RunState, read_states, starting_run
from biphasic.study.tree import StudyRun, build_tree, keep_scored, owner_of, study_tree
from conftest import Write
from helpers.tiny import config_of

ROOT = Path(__file__).parents[2]


def tree_of(histories: dict[str, str], **continues: str) -> dict[str, StudyRun]:
    lengths = {name: len(history) for name, history in histories.items()}

    def shared(first: str, second: str) -> int:
        pairs = zip(histories[first], histories[second], strict=False)
        return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

    return build_tree(lengths, continues, shared)


def starts(tree: dict[str, StudyRun]) -> dict[str, tuple[str | None, int]]:
    return {name: (run.parent, run.start) for name, run in tree.items()}


def test_switches_and_decays_start_from_one_trunk() -> None:
    # c: CLM, m: MLM, d and e: their decays.
    tree = tree_of({"clm": "ccccccdd", "late": "ccccmmee", "early": "ccmmmmee", "short": "ccmmee"})
    assert starts(tree) == {"clm": (None, 0), "late": ("clm", 4), "early": ("clm", 2), "short": ("early", 4)}
    assert {name: run.kept for name, run in tree.items()} == {"clm": (2, 4), "late": (), "early": (4,), "short": ()}
    assert [run.length - run.start for run in tree.values()] == [8, 4, 6, 2]


def test_a_run_starts_from_the_run_that_trained_the_shared_batches_itself() -> None:
    # `third` shares one batch with both, and `second` has no checkpoint there: it started at 3.
    tree = tree_of({"first": "aaaa", "second": "aaabb", "third": "ac"})
    assert starts(tree)["third"] == ("first", 1)


def test_the_first_batch_of_a_warmup_is_not_shared(write_yaml: Write) -> None:
    """Its rate is 0 whatever the peak is. A stretch of a hundredth of a run is shared."""
    keys: dict[str, Any] = {"max_duration": "200ba", "objective__phases": [{"name": "mlm"}], "schedule__warmup": "4ba"}
    low = config_of(write_yaml("low", **keys, optimizer__lr=1e-3))
    high = config_of(write_yaml("high", **keys, optimizer__lr=2e-3))
    assert starts(study_tree({"low": low, "high": high}, {})) == {"low": (None, 0), "high": (None, 0)}
    for until, start in ((1, (None, 0)), (2, ("high", 2))):
        phases = [{"name": "mlm", "until": f"{until}ba"}, {"name": "clm"}]
        switched = config_of(write_yaml("switched", **{**keys, "objective__phases": phases}, optimizer__lr=2e-3))
        assert starts(study_tree({"high": high, "switched": switched}, {}))["switched"] == start


def test_decays_on_candidate_data_cost_one_trunk(write_yaml: Write, tmp_path: Path) -> None:
    def decay_on(name: str) -> PretrainConfig:
        data = {"train": {"local": str(tmp_path / name)}}
        phases = [{"name": "clm", "until": "100ba"}, {"name": "mlm", "until": "160ba"}, {"name": "mlm", "data": data}]
        keys: dict[str, Any] = {"max_duration": "200ba", "schedule__decay": "40ba", "objective__phases": phases}
        return config_of(write_yaml(name, **keys))

    tree = study_tree({name: decay_on(name) for name in ("web", "code", "books")}, {})
    assert starts(tree) == {"web": (None, 0), "code": ("web", 160), "books": ("web", 160)}
    assert sum(run.length - run.start for run in tree.values()) == 160 + 3 * 40


def test_runs_on_other_data_share_nothing(write_yaml: Write, tmp_path: Path) -> None:
    runs = {
        name: config_of(write_yaml(name, data__train__local=str(tmp_path / name), max_duration="200ba"))
        for name in ("web", "code")
    }
    assert starts(study_tree(runs, {})) == {"web": (None, 0), "code": (None, 0)}


def test_no_run_is_the_trunk_by_itself() -> None:
    tree = tree_of({"x": "aab", "y": "aac", "z": "aacd"})
    assert starts(tree) == {"x": (None, 0), "y": ("x", 2), "z": ("y", 3)}
    assert tree["y"].kept == ()  # its final checkpoint is always kept


def test_a_scored_checkpoint_is_kept_by_the_run_that_trains_its_batch() -> None:
    tree = tree_of({"clm": "ccccccdd", "late": "ccccmmee", "later": "ccccmnee"})
    owners = {batch: owner_of(tree, "later", batch) for batch in range(1, 9)}
    assert owners == {1: "clm", 2: "clm", 3: "clm", 4: "clm", 5: "late", 6: "later", 7: "later", 8: "later"}
    kept = keep_scored(tree, {"later": [2, 5, 7], "clm": [7]})
    assert {name: run.scored for name, run in kept.items()} == {"clm": (2, 7), "late": (5,), "later": (7,)}
    with pytest.raises(UserError, match=r"stages.checkpoints.late: expected batches below 8, the model's end; got 8"):
        keep_scored(tree, {"late": [8]})
    with pytest.raises(UserError, match=r"merges.x.merge_of.late: expected batches below 8, the model's end; got 9"):
        keep_scored(tree, {"late": [9]}, "merges.x.merge_of")


def test_a_run_that_another_contains_is_trained_first() -> None:
    tree = tree_of({"long": "aaaab", "trunk": "aaa", "shorter": "aa"})
    assert list(tree) == ["shorter", "trunk", "long"]
    assert starts(tree) == {"shorter": (None, 0), "trunk": ("shorter", 2), "long": ("trunk", 3)}


def test_a_continued_run_is_trained_first_and_shares_nothing() -> None:
    tree = tree_of({"more": "xx", "even_more": "xxy", "base": "ab"}, more="base", even_more="base")
    assert list(tree) == ["base", "more", "even_more"]
    assert starts(tree) == {"base": (None, 0), "more": (None, 0), "even_more": ("more", 2)}
    assert tree["more"].needs == ("base",) and tree["even_more"].needs == ("more", "base")


def test_two_models_with_one_history() -> None:
    with pytest.raises(
        UserError, match=r"models.b: expected a history that differs from that of models.a; both train the same 2"
    ):
        tree_of({"a": "xy", "b": "xy"})


def test_a_run_starts_from_the_nearest_run_above_that_kept_a_checkpoint() -> None:
    tree = tree_of({"trunk": "aaaaaa", "branch": "aaaabbb", "twig": "aaaabbcc"})
    assert starts(tree) == {"trunk": (None, 0), "branch": ("trunk", 4), "twig": ("branch", 6)}

    def start(trunk: set[int], branch: set[int]) -> str | None:
        states = {"trunk": RunState(frozenset(trunk)), "branch": RunState(frozenset(branch))}
        return starting_run(tree["twig"], tree, states)

    assert start({4}, {6}) == "branch"
    assert start({4}, {7}) == "trunk"
    # Both share only four batches with the trunk.
    assert start({5}, {7}) is None


def test_a_checkpoint_without_a_manifest_does_not_count(tmp_path: Path) -> None:
    study = load(ROOT / "tests/config/study.yaml", [f"folder={tmp_path}"])
    assert isinstance(study, StudyConfig)
    folder = tmp_path / "clm" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "ba10.json").write_bytes(Manifest(10, "ba10-rank0.pt", {}, {}).to_bytes())
    (folder / "ba20-rank0.pt").touch()
    state = read_states(study)["clm"]
    assert (state.batches, state.trained) == ({10}, 10)
    (folder / "ba10.json").write_bytes(b"{")
    with pytest.raises(UserError, match=r"clm/checkpoints: ba10.json is not a manifest"):
        read_states(study)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=8, unique=True))
def test_each_shared_beginning_is_trained_once(texts: list[str]) -> None:
    histories = {f"run{index}": text for index, text in enumerate(texts)}
    tree = tree_of(histories)
    beginnings = {text[:end] for text in texts for end in range(1, len(text) + 1)}
    assert sum(run.length - run.start for run in tree.values()) == len(beginnings)
    trained: set[str] = set()
    for name, run in tree.items():
        history = histories[name]
        assert run.length - run.start > 0
        if run.parent is not None:
            parent = tree[run.parent]
            # The parent has trained the last shared batch itself, and keeps the checkpoint after it.
            assert parent.start < run.start and (run.start in parent.kept or run.start == parent.length)
            assert history[: run.start] == histories[run.parent][: run.start]
        else:
            assert run.start == 0
        # It starts as late as it can.
        assert history[: run.start + 1] not in trained
        trained |= {history[:end] for end in range(1, len(history) + 1)}
