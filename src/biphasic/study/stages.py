"""The stages after a study's pretraining: export, fine-tuning and scoring, by the same jobs as for single models."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from biphasic.checkpointing.manifest import Manifest, manifest_name, read_manifest
from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.finetune import EncoderConfig
from biphasic.config.load import dump, load_job
from biphasic.config.read import format_override
from biphasic.config.study import StudyConfig, expand
from biphasic.config.sweep import SweepConfig
from biphasic.errors import UserError
from biphasic.export.folder import has_export
from biphasic.storage import join, open_store, user_errors
from biphasic.study.state import read_states, require_own_folders
from biphasic.study.tree import owner_of, study_runs
from biphasic.sweep.grid import trial_configs

_SCORES_FILE = "scores.json"
"""The file that an evaluation writes last."""


def encoder_folder(study: StudyConfig, name: str) -> Path:
    """Return the folder of a model's export."""
    return Path(study.local_folder) / name / "encoder"


@dataclass(frozen=True)
class ScoredModel:
    """A model that the stages export and score: the end of a run, one of its checkpoints, or a mean of checkpoints."""

    name: str
    sources: tuple[tuple[str, int], ...]
    """The checkpoint, or those that are merged: the run whose folder has it, and its batch from the history's start."""
    source: dict[str, Any]
    """What its export records, to be made again after a change: the batch in its own run, or the merge."""


def scored_models(study: StudyConfig) -> dict[str, ScoredModel]:
    """Return the study's models by name, each followed by its checkpoints in `stages.checkpoints`; then its means.

    Raises a UserError if two histories are equal, or a checkpoint is not before its model's end or has a model's name.
    """
    _, tree = study_runs(study)

    def steps_before(name: str) -> int:
        continued = study.continues.get(name)
        return 0 if continued is None else tree[continued].length + steps_before(continued)

    models: dict[str, ScoredModel] = {}
    for name in study.models:
        before, length = steps_before(name), tree[name].length
        models[name] = ScoredModel(name, ((name, length),), {"batch": length})
        for batch in study.stages.checkpoints.get(name, []):
            steps = before + batch
            if f"{name}-{steps}" in study.models | study.merges:
                key = f"stages.checkpoints.{name}"
                raise UserError(f"{key}: {batch:,} is named as the model {name}-{steps}: rename that model")
            source = (owner_of(tree, name, batch), batch)
            models[f"{name}-{steps}"] = ScoredModel(f"{name}-{steps}", (source,), {"batch": batch})
    for name, merge in study.merges.items():
        parts = ((source, batch) for source, batches in merge.merge_of.items() for batch in batches)
        sources = tuple((owner_of(tree, source, batch), batch) for source, batch in parts)
        models[name] = ScoredModel(name, sources, merge.model_dump(mode="json"))
    return models


def export(study: StudyConfig, limit: int | None = None) -> int:
    """Export all trained models, scored checkpoints and means that have no export yet. Return the exit status.

    An export of other checkpoints, made before `max_duration` or a merge was changed or a model was trained again, is
    replaced, and its evaluation's scores are removed. Raises a UserError if the study's folder can't be read or a checkpoint
    can't be merged or exported.
    """
    from biphasic.checkpointing.merge import merge_checkpoints
    from biphasic.export.run import export_checkpoint

    configs, states, models = expand(study), read_states(study), scored_models(study)

    def is_trained(model: ScoredModel) -> bool:
        if model.name in configs:
            return states[model.name].is_done(configs[model.name])
        return all(batch in states[run].batches for run, batch in model.sources)

    def manifests(model: ScoredModel) -> list[Manifest]:
        newest = states[model.name].newest if model.name in configs else None
        if newest is not None:
            return [newest]
        with user_errors(f"{model.name}: its checkpoints can't be read", ValueError):
            places = [open_store(study.checkpoints_of(run)) for run, _ in model.sources]
            return [read_manifest(p, manifest_name(batch)) for p, (_, batch) in zip(places, model.sources, strict=True)]

    trained = {model.name: manifests(model) for model in models.values() if is_trained(model)}
    sources = {
        name: models[name].source | {"manifest_sha256": [manifest.sha256 for manifest in checkpoints]}
        for name, checkpoints in trained.items()
    }
    new = [models[name] for name, source in sources.items() if not has_export(encoder_folder(study, name), source)]
    for model in new[:limit]:
        folder, runs = encoder_folder(study, model.name), [run for run, _ in model.sources]
        checkpoints = zip(runs, trained[model.name], strict=True)
        places = [join(study.checkpoints_of(run), manifest.path) for run, manifest in checkpoints]
        if model.name in study.merges:
            merged = folder.with_name("merged")
            shutil.rmtree(merged, ignore_errors=True)  # it may be of another merge
            merge_checkpoints(places, merged, weights=study.merges[model.name].weights)
            places = [str(merged)]
        Path(study.local_folder, "evaluate", model.name, _SCORES_FILE).unlink(missing_ok=True)
        export_checkpoint(places[0], folder, name=model.name, force=True, source=sources[model.name])
    if waiting := [name for name in models if name not in trained]:
        print(f"not trained yet: {', '.join(waiting)}", flush=True)
    return 0


def check_stages(study: StudyConfig) -> None:
    """Check the YAMLs of the stages, so that their faults are found before the training.

    Raises a ConfigError if one is invalid, also those of the sweep's tasks.
    """
    first = next(iter(study.models))
    if study.stages.finetune is not None:
        trial_configs(_sweep_of(study, [first]))
    if study.stages.evaluate is not None:
        evaluation_config(study, first)


def sweep_config(study: StudyConfig) -> SweepConfig:
    """Return the sweep over the study's exported models.

    Raises a ConfigError if the sweep's YAML is invalid, and a UserError without `stages.finetune` or exported models.
    """
    return _sweep_of(study, _exported(study))


def _sweep_of(study: StudyConfig, names: Iterable[str]) -> SweepConfig:
    swept = {name: EncoderConfig(path=str(encoder_folder(study, name))) for name in names}
    values = {"models": swept, "output": join(study.folder, "sweep")}
    return load_job(SweepConfig, _required(study, "finetune")).model_copy(update=values)


def evaluate(study: StudyConfig, limit: int | None = None, score: Callable[[Path], int] | None = None) -> int:
    """Evaluate each exported model that has no scores, into `<local folder>/evaluate/<model>`. Return the exit status.

    `score` runs an evaluation's YAML and returns its exit status, instead of a separate process. Raises a ConfigError
    if the evaluation's YAML is invalid, and a UserError if no model is exported.
    """
    configs = [evaluation_config(study, name) for name in _exported(study)]
    new = [config for config in configs if not (config.run_folder / _SCORES_FILE).is_file()]
    for config in new[:limit]:
        name = f"{config.run_name}.yaml"
        open_store(config.output).write(name, dump(config).encode())
        file = Path(config.output) / name
        # In a separate process: with several GPUs an evaluation replaces its own by Composer's launcher.
        command = [sys.executable, "-m", "biphasic.main", str(file)]
        status = subprocess.run(command, check=False).returncode if score is None else score(file)
        if status:
            return status
    return 0


def evaluation_config(study: StudyConfig, name: str) -> EvaluateConfig:
    """Return the evaluation of one exported model.

    Raises a ConfigError if the evaluation's YAML is invalid, and a UserError if `stages.evaluate` is missing.
    """
    values = {
        "run_name": name,
        "output": f"{study.local_folder}/evaluate",
        "model.path": str(encoder_folder(study, name)),
    }
    own = [format_override(key, value) for key, value in values.items()]
    return load_job(EvaluateConfig, _required(study, "evaluate"), own)


def _exported(study: StudyConfig) -> list[str]:
    """Return the names of the exported models, and print the names of the others."""
    require_own_folders(study)
    models = scored_models(study)
    names = [name for name, model in models.items() if has_export(encoder_folder(study, name), model.source)]
    if not names:
        raise UserError(f"{study.local_folder}: no model of the study is exported yet: --stage export")
    if waiting := [name for name in models if name not in names]:
        print(f"not exported yet: {', '.join(waiting)}", flush=True)
    return names


def _required(study: StudyConfig, stage: Literal["finetune", "evaluate"]) -> str:
    file = getattr(study.stages, stage)
    if file is None:
        raise UserError(f"stages.{stage} is missing in the study's YAML: it names the {stage} stage's YAML")
    return file
