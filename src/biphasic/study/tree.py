"""Find which beginnings the runs of a study share, and where each run starts. Pure functions of the runs' histories.

Two runs share their first N batches if they train them identically and N is at least a hundredth of the shorter run.
Each shared beginning is trained once, by the first run that contains it; later runs start from its checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from biphasic.config.history import first_difference, history_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig, expand
from biphasic.errors import UserError
from biphasic.timeline import decay_start

_MIN_SHARED = 0.01
"""Minimum shared beginning, as a share of the shorter run. Less isn't worth a checkpoint and a start."""


@dataclass(frozen=True)
class StudyRun:
    """A run of a study. Batches are counted from the start of its history."""

    name: str
    length: int
    """Number of batches of the complete history."""
    parent: str | None = None
    """The run from whose checkpoint this run starts. None: it trains from the beginning."""
    start: int = 0
    """The first batch that this run trains itself."""
    continues: str | None = None
    """The run whose final weights are this run's initial weights."""
    kept: tuple[int, ...] = ()
    """Batches within this run at which other runs start."""
    scored: tuple[int, ...] = ()
    """Batches whose checkpoints are kept to be scored (`stages.checkpoints`) or merged (`merges`)."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The runs whose checkpoints this run needs."""
        return tuple(name for name in (self.parent, self.continues) if name is not None)


def study_runs(study: StudyConfig) -> tuple[dict[str, PretrainConfig], dict[str, StudyRun]]:
    """Return the models' configurations by name, and the runs by name in training order. `study` must be checked.

    Raises a UserError if two models have the same history, or a scored or merged checkpoint is not within its model's run.
    """
    configs = expand(study)
    tree = keep_scored(study_tree(configs, study.continues), study.stages.checkpoints)
    for name, merge in study.merges.items():
        # The end's checkpoint always remains.
        before = {n: [batch for batch in batches if batch != tree[n].length] for n, batches in merge.merge_of.items()}
        tree = keep_scored(tree, before, f"merges.{name}.merge_of")
    return configs, tree


def study_tree(configs: Mapping[str, PretrainConfig], continues: Mapping[str, str]) -> dict[str, StudyRun]:
    """Build the tree of these configurations, as `build_tree` does from the batches that they share."""
    lengths = {name: config.batch_shapes.batches(config.max_duration) for name, config in configs.items()}
    decays = {name: c.batch_shapes.batches(decay_start(c.schedule, c.max_duration)) for name, c in configs.items()}
    histories = {name: history_of(config) for name, config in configs.items()}
    streams = {name: config.data.streams for name, config in configs.items()}

    def shared(first: str, second: str) -> int:
        if histories[first].constants != histories[second].constants or streams[first] != streams[second]:
            return 0  # a run compares its data by hash, and a study by path, since the data may not exist yet
        difference = first_difference(histories[first], histories[second])
        shorter = min(lengths[first], lengths[second])
        batches = shorter if difference is None else difference.batch
        if difference is not None and batches - 1 in (decays[first], decays[second]):
            # The first batch of a decay still has the full learning rate. Sharing it would need another checkpoint, one
            # batch after the one that each run saves at its decay's start.
            batches -= 1
        return batches if batches >= _MIN_SHARED * shorter else 0

    return build_tree(lengths, continues, shared)


def owner_of(tree: Mapping[str, StudyRun], name: str, batch: int) -> str:
    """Return the run that trains a batch of a model's history (counted from 1): the model's own run or an ancestor."""
    run = tree[name]
    return name if run.parent is None or batch > run.start else owner_of(tree, run.parent, batch)


def keep_scored(
    tree: Mapping[str, StudyRun], checkpoints: Mapping[str, Sequence[int]], key: str = "stages.checkpoints"
) -> dict[str, StudyRun]:
    """Return the runs with the batches whose checkpoints they keep for scoring. `checkpoints` (of `key`): batches by model.

    Raises a UserError if a batch is not before its model's end.
    """
    runs = dict(tree)
    for name, batches in checkpoints.items():
        for batch in batches:
            if batch >= tree[name].length:
                expected = f"expected batches below {tree[name].length:,}, the model's end"
                raise UserError(f"{key}.{name}: {expected}; got {batch:,}")
            owner = runs[owner_of(tree, name, batch)]
            runs[owner.name] = replace(owner, scored=tuple(sorted({*owner.scored, batch})))
    return runs


def build_tree(
    lengths: Mapping[str, int], continues: Mapping[str, str], shared: Callable[[str, str], int]
) -> dict[str, StudyRun]:
    """Return the runs by name, in training order.

    That is the order of `lengths`, except that a run comes after the run that it continues and after runs whose history
    it contains completely.

    Args:
        lengths: number of batches of each run.
        continues: for each run that continues another, the other's name. No cycles.
        shared: returns the number of first batches that two runs share.

    Raises:
        UserError: two runs have the same history.
    """
    common: dict[tuple[str, str], int] = {}
    for first, second in combinations(lengths, 2):
        common[first, second] = common[second, first] = shared(second, first)
        if common[first, second] == lengths[first] == lengths[second]:
            message = f"expected a history that differs from that of models.{first}; both train the same"
            raise UserError(f"models.{second}: {message} {lengths[first]:,} batches")
    runs: dict[str, StudyRun] = {}
    for name in _order(lengths, continues, common):
        run = StudyRun(name, lengths[name], continues=continues.get(name))
        most = max((common[name, other] for other in runs), default=0)
        if most:
            # Of the runs that contain the shared beginning, the first trains it, and the others start from it.
            parent = next(parent for parent in runs.values() if common[name, parent.name] == most)
            run = replace(run, parent=parent.name, start=most)
            if most < parent.length:
                runs[parent.name] = replace(parent, kept=tuple(sorted({*parent.kept, most})))
        runs[name] = run
    return runs


def _order(lengths: Mapping[str, int], continues: Mapping[str, str], common: Mapping[tuple[str, str], int]) -> Iterator[str]:
    placed: set[str] = set()

    def place(name: str) -> Iterator[str]:
        if name in placed:
            return
        placed.add(name)
        if name in continues:
            yield from place(continues[name])
        contained = [other for other in lengths if other != name and common[name, other] == lengths[other]]
        for other in sorted(contained, key=lengths.__getitem__):
            yield from place(other)
        yield name

    for name in lengths:
        yield from place(name)
