"""What follows the pretraining of a study: export, fine-tune and score its models with the jobs that single models use."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from biphasic.config.evaluate import EvaluateConfig
from biphasic.config.load import dump, load
from biphasic.config.plan import batches_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.config.study_models import expand
from biphasic.config.sweep import SweepConfig, SweepModel
from biphasic.errors import ConfigError, Problem, UserError
from biphasic.export.folder import EXPORT_FILE
from biphasic.storage import open_store
from biphasic.study.state import read_states

_MAIN = Path(__file__).parents[2] / "main.py"


def encoder_folder(study: StudyConfig, name: str) -> Path:
    """Return the folder of a model's export."""
    return Path(study.local_folder) / name / "encoder"


def export(study: StudyConfig, limit: int | None = None) -> int:
    """Export the final weights of each trained model that has no export. Return the exit status.

    Raises:
        UserError: the study's folder can't be read, or a checkpoint can't be exported.
    """
    from biphasic.export.run import export_checkpoint

    configs, states = expand(study), read_states(study)
    waiting = [name for name in study.models if not states[name].is_done(configs[name])]
    new = [name for name in study.models if name not in waiting and not _is_exported(study, name)]
    for name in new[:limit]:
        export_checkpoint(study.checkpoints_of(name), encoder_folder(study, name), name=name)
    _print_waiting("not trained yet", waiting)
    return 0


def sweep_config(study: StudyConfig) -> SweepConfig:
    """Return the sweep over the study's exported models.

    Raises:
        ConfigError: the sweep's YAML can't be used.
        UserError: `stages.finetune` is missing, or no model is exported.
    """
    file = _required(study.stages.finetune, "finetune")
    sweep = load(file)
    if not isinstance(sweep, SweepConfig):
        raise ConfigError([Problem(file, "job", f"expected sweep, for stages.finetune; got {sweep.job}")])
    names = list(_exported(study))
    configs = expand(study)
    models = {
        name: SweepModel(path=str(encoder_folder(study, name)), steps=total_steps(study, configs, name))
        for name in names
    }
    return sweep.model_copy(update={"models": models, "output": study.sweep_output})


def total_steps(study: StudyConfig, configs: dict[str, PretrainConfig], name: str) -> int:
    """Return the optimizer steps of a model's pretraining, with those of the models that it continues."""
    own, continued = batches_of(configs[name].max_duration, configs[name]), study.continues.get(name)
    return own if continued is None else own + total_steps(study, configs, continued)


def evaluate(study: StudyConfig, limit: int | None = None) -> int:
    """Run the evaluation of `stages.evaluate` for each exported model that has no scores. Return the exit status.

    Each model's results are in `<local folder>/evaluate/<model>`.

    Raises:
        ConfigError: the evaluation's YAML can't be used.
        UserError: no model is exported.
    """
    configs = [evaluation_config(study, name) for name in _exported(study)]
    # scores.json is an evaluation's last file.
    new = [config for config in configs if not (config.run_folder / "scores.json").is_file()]
    for config in new[:limit]:
        name = f"{config.run_name}.yaml"
        open_store(config.output).write(name, dump(config).encode())
        # A process of its own: with several GPUs an evaluation replaces its process by Composer's launcher.
        status = subprocess.run([sys.executable, str(_MAIN), str(Path(config.output) / name)], check=False).returncode
        if status:
            return status
    return 0


def evaluation_config(study: StudyConfig, name: str) -> EvaluateConfig:
    """Return the evaluation of one exported model.

    Raises:
        ConfigError: the evaluation's YAML can't be used.
        UserError: `stages.evaluate` is missing.
    """
    file = _required(study.stages.evaluate, "evaluate")
    folder = Path(study.local_folder)
    model = f"model.path={encoder_folder(study, name)}"
    config = load(file, [f"run_name={name}", f"output={folder / 'evaluate'}", model])
    if not isinstance(config, EvaluateConfig):
        raise ConfigError([Problem(file, "job", f"expected evaluate, for stages.evaluate; got {config.job}")])
    return config


def _exported(study: StudyConfig) -> Iterator[str]:
    names = [name for name in study.models if _is_exported(study, name)]
    if not names:
        raise UserError(f"{study.local_folder}: no model of the study is exported yet: --stage export")
    _print_waiting("not exported yet", [name for name in study.models if name not in names])
    yield from names


def _is_exported(study: StudyConfig, name: str) -> bool:
    return (encoder_folder(study, name) / EXPORT_FILE).is_file()


def _print_waiting(label: str, names: list[str]) -> None:
    if names:
        print(f"{label}: {', '.join(names)}", flush=True)


def _required(file: str | None, stage: str) -> str:
    if file is None:
        raise UserError(f"stages.{stage} is missing in the study's YAML: it names the {stage} stage's YAML")
    return file
