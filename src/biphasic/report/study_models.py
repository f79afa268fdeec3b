"""Find what distinguishes the models of a study: size, objective, masking ratio, steps, and the model that one continues.

A run's resolved configuration says it exactly. Without one, the model's name does, in the form of the paper's models on the
hub:

    610m-mlm40-42k                  size, objective, steps; `mlm40` masks 40%
    610m-clm-10k-mlm40-42k          CLM until step 10,000, MLM until step 42,000
    610m-mlm40-dec42k-mlm40-54k     continued from the decayed 610m-mlm40-42k, until step 54,000 in all
    610m-mlm40-42k-5000             a checkpoint of 610m-mlm40-42k
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from biphasic.config.durations import Duration
from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.timeline import MLMPhase, RampConfig, spans
from biphasic.errors import UserError

FORM = "610m-clm-10k-mlm40-42k (docs/report.md)"


@dataclass(frozen=True)
class Facets:
    """What distinguishes a model from the others of its study."""

    run: str
    """The run's name: the model's name without the steps of a checkpoint."""
    size: str
    """`210m`, `610m`, `1b`, or another number of parameters."""
    objective: str
    """The objectives of the run's phases: `clm`, `mlm`, `clm-mlm`, `mlm-clm-mlm`."""
    masking_ratio: float | None
    """The masking ratio of the MLM phases; None without any, with a ramp, or with several ratios."""
    clm_steps: int
    """The run's CLM steps, without those of the model that it continues."""
    total_steps: int
    """Steps of the complete run, including those of the model that it continues."""
    steps: int
    """Steps of this model: fewer than `total_steps` for a checkpoint from the middle of a run."""
    continued_from: str | None = None
    """The decayed model whose weights the run started from; None for a run from initial weights."""
    base_steps: int = 0
    """Steps of the model that the run continues."""

    @property
    def is_final(self) -> bool:
        """Whether the model is the end of its run."""
        return self.steps == self.total_steps


def facets_of_name(name: str) -> Facets:
    """Return what the name of a model says of it, in the form of the paper's models on the hub.

    Raises:
        UserError: the name does not have this form.
    """
    size, *parts = name.split("-")
    checkpoint = parts.pop() if len(parts) % 2 else None
    if not size or not parts:
        raise UserError(f"model {name}: expected a name such as {FORM}")
    start = base_steps = clm_steps = 0
    continued_from: str | None = None
    objectives: list[str] = []
    ratios: set[float | None] = set()
    for index in range(0, len(parts), 2):
        objective, ratio = _objective(name, parts[index])
        decayed = parts[index + 1].startswith("dec")
        end = _steps(name, parts[index + 1].removeprefix("dec"))
        if end <= start:
            raise UserError(
                f"model {name}: {parts[index + 1]} must be after {start:,} steps, as steps count from the start"
            )
        if decayed and index + 2 == len(parts):
            raise UserError(f"model {name}: expected an objective and steps after {parts[index + 1]}")
        if decayed:
            # What comes before belongs to the model that is continued.
            base = [size, *parts[: index + 1], parts[index + 1].removeprefix("dec")]
            continued_from, base_steps = "-".join(base).replace("-dec", "-"), end
            objectives, ratios, clm_steps = [], set(), 0
        else:
            objectives.append(objective)
            ratios |= {ratio} if objective == "mlm" else set()
            clm_steps += end - start if objective == "clm" else 0
        start = end
    steps = start if checkpoint is None else _steps(name, checkpoint)
    if not base_steps < steps <= start:
        expected = f"from {base_steps + 1:,} to {start:,}, the run's last step"
        raise UserError(f"model {name}: expected the steps of a checkpoint {expected}; got {checkpoint}")
    return Facets(
        run=name if checkpoint is None else name.removesuffix(f"-{checkpoint}"),
        size=size,
        objective="-".join(objectives),
        masking_ratio=_only(ratios),
        clm_steps=clm_steps,
        total_steps=start,
        steps=steps,
        continued_from=continued_from,
        base_steps=base_steps,
    )


def facets_of_config(name: str, config: PretrainConfig, known: Mapping[str, Facets]) -> Facets:
    """Return the facets of a run's final model, from the resolved configuration.

    Args:
        name: the run's name.
        config: the configuration.
        known: other models, one of which the run may continue (`model.init_from` has its name as a folder).

    Raises:
        UserError: phases are not in batches, tokens or rows, or the size is not known.
    """
    init_from = config.model.init_from
    base = next((known[part] for part in reversed(_folders(init_from)) if part in known), None)
    base_steps = _steps_of_checkpoint(base, _folders(init_from)[-1]) if base is not None else 0
    clm_steps = 0
    laid_out = spans(config.objective.phases, config.max_duration)
    for span in laid_out:
        if span.phase.name == "clm":
            clm_steps += _batches(name, config, span.end) - _batches(name, config, span.start)
    ratios = [span.phase.masking_ratio for span in laid_out if isinstance(span.phase, MLMPhase)]
    total = base_steps + _batches(name, config, config.max_duration)
    return Facets(
        run=name,
        size=_size(name, config, base),
        objective="-".join(span.phase.name for span in laid_out),
        masking_ratio=_only({None if isinstance(ratio, RampConfig) else ratio for ratio in ratios}),
        clm_steps=clm_steps,
        total_steps=total,
        steps=total,
        continued_from=base.run if base is not None else init_from,
        base_steps=base_steps,
    )


def facets_of_models(
    names: list[str], configs: Mapping[str, PretrainConfig]
) -> tuple[dict[str, Facets], dict[str, str]]:
    """Return the facets of the models, from configurations where there are any, otherwise from names.

    Args:
        names: the models. `610m-mlm40-42k-5000` is a checkpoint of `610m-mlm40-42k` if that has a configuration.
        configs: resolved configurations by run.

    Returns:
        The facets by model, and the reason for each model of which nothing is known.
    """
    runs, problems = _facets_of_runs(configs)
    facets: dict[str, Facets] = {}
    for name in names:
        run, _, steps = name.rpartition("-")
        if name in runs or name in problems:
            if name in runs:
                facets[name] = runs[name]
        elif steps.isdigit() and run in runs and runs[run].base_steps < int(steps) <= runs[run].total_steps:
            facets[name] = replace(runs[run], steps=int(steps))
        else:
            try:
                facets[name] = facets_of_name(name)
            except UserError as error:
                problems[name] = str(error)
    return facets, {name: problems[name] for name in names if name in problems}


def short_steps(steps: int) -> str:
    """Format a number of steps as in names: `42k`, `500`."""
    return f"{steps / 1000:g}k" if steps >= 1000 and steps % 100 == 0 else str(steps)


def parameters_in_size(size: str) -> float:
    """Return the number of parameters that a size says, to sort by; infinity if it says none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", size)
    return float(match[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[match[2]] if match else float("inf")


def _facets_of_runs(configs: Mapping[str, PretrainConfig]) -> tuple[dict[str, Facets], dict[str, str]]:
    """Return the facets of runs with a configuration, and the reason for each that has none."""
    runs: dict[str, Facets] = {}
    problems: dict[str, str] = {}
    visited: set[str] = set()

    def visit(name: str) -> None:
        if name in visited:
            return
        visited.add(name)
        for part in _folders(configs[name].model.init_from):
            if part in configs:
                visit(part)  # a run that continues another one needs its facets
        try:
            runs[name] = facets_of_config(name, configs[name], runs)
        except UserError as error:
            problems[name] = str(error)

    for name in sorted(configs):
        visit(name)
    return runs, problems


def _steps_of_checkpoint(run: Facets, file: str) -> int:
    """Return the steps of a run's checkpoint `ba42000-rank0.pt`, or of its final model for another file."""
    match = re.match(r"ba(\d+)", file)
    return run.base_steps + int(match[1]) if match else run.total_steps


def _folders(path: str | None) -> list[str]:
    return (path or "").split("/")


def _objective(name: str, part: str) -> tuple[str, float | None]:
    match = re.fullmatch(r"clm|mlm(\d+)", part)
    if match is None or (match[1] and not 0 < int(match[1]) < 100):
        raise UserError(f"model {name}: expected `clm`, or `mlm` and a masking ratio in percent; got {part!r}")
    return part[:3], int(match[1]) / 100 if match[1] else None


def _steps(name: str, text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k?)", text)
    steps = float(match[1]) * (1000 if match[2] else 1) if match else 0
    if not steps or steps != int(steps):
        raise UserError(f"model {name}: expected a number of steps, such as 42k or 500; got {text!r}")
    return int(steps)


def _only(ratios: set[float | None]) -> float | None:
    """Return the only ratio of the set; None if there are several."""
    return next(iter(ratios)) if len(ratios) == 1 else None


def _batches(name: str, config: PretrainConfig, duration: Duration) -> int:
    if duration.unit == "ep":
        raise UserError(f"model {name}: {duration} can't be given in steps before the data is read")
    return round(config.batch_shape.batches(duration))


def _size(name: str, config: PretrainConfig, base: Facets | None) -> str:
    """Return the size by the preset, by the model that is continued, by the name, or by the number of parameters."""
    if config.model.preset is not None:
        return config.model.preset
    if base is not None:
        return base.size
    try:
        return facets_of_name(name).size
    except UserError as error:
        architecture = architecture_of(config.model)
        if architecture is None:
            raise UserError(
                f"{error}; its size is not known, because model.init_from is not a model of the study"
            ) from None
        return f"{architecture.parameters / 1e6:.3g}m"
