"""Name models, and find what distinguishes those of a study: size, objective, masking ratio, steps, continued model.

These facets come from a run's resolved configuration if there is one. Otherwise they come from the model's name, in the
format of the paper's models on the hub, in which exported models are named too:

    610m-mlm40-42k                  size, objective, steps; `mlm40` masks 40%
    610m-clm-10k-mlm40-42k          CLM until step 10,000, MLM until step 42,000
    610m-mlm40-dec42k-mlm40-54k     continued from the decayed 610m-mlm40-42k, until step 54,000 in total
    610m-mlm40-42k-5000             a checkpoint of 610m-mlm40-42k
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.durations import Duration, TrainingProgress
from biphasic.errors import UserError
from biphasic.timeline import resolve_phases

_STEPS = r"\d+(?:\.\d{1,3}(?=k))?k?"
_PHASE = re.compile(rf"-(?P<objective>clm|mlm(?P<ratio>[1-9]\d?))-(?P<decayed>dec)?(?P<end>{_STEPS})(?=-|$)")
_NAME = re.compile(
    rf"(?P<size>[^-]+)(?P<phases>(?:-(?:clm|mlm[1-9]\d?)-(?:dec)?{_STEPS})+)(?:-(?P<checkpoint>{_STEPS}))?"
)
_CHECKPOINT = re.compile(r"(?:ep\d+-)?ba(\d+)(?=-|$)")
"""Name of a checkpoint: `ba18000-rank0.pt`, or the folder `ep0-ba18000`."""


@dataclass(frozen=True)
class Facets:
    """What distinguishes a model from the other models of its study."""

    run: str
    """Name of the run: the model's name without a checkpoint's steps."""
    size: str
    """`210m`, `610m`, `1b`, or another number of parameters."""
    objective: str
    """The objectives of the run's phases: `clm`, `mlm`, `clm-mlm`, `mlm-clm-mlm`."""
    masking_ratio: float | None
    """The ratio of all MLM phases; None if there are no MLM phases, a ramp, or several ratios."""
    clm_steps: int
    """CLM steps of the run, excluding those of the continued model."""
    total_steps: int
    """Steps of the complete run, including those of the continued model."""
    steps: int
    """Steps of this model; fewer than `total_steps` for a checkpoint from the middle of a run."""
    continued_from: str | None = None
    """The model whose weights the run started from."""
    base_steps: int = 0
    """Steps of the continued model."""


def model_name(config: dict[str, Any], record: dict[str, Any]) -> str:
    """Return the model's name: as the paper names its models if the size is a preset, else from the run's name.

    The paper's names have the objective and last step of each phase. The step of a checkpoint from before the end of
    the run is appended (`610m-clm-10k-mlm40-42k-20000`).
    """
    total, size = Duration.parse(config["max_duration"]), config["model"].get("preset")
    parts = [config["run_name"]] if size is None else [size]
    for phase in config["objective"]["phases"] if size else ():
        ratio = phase.get("masking_ratio")
        end = Duration.parse(phase["until"]).resolve(total) if phase.get("until") else total
        thousands = end.unit == "ba" and end.value % 1000 == 0
        steps = f"{end.value / 1000:.0f}k" if thousands else str(end).removesuffix("ba")
        parts += [phase["name"] + (f"{100 * ratio:.0f}" if isinstance(ratio, float) else ""), steps]
    done = TrainingProgress(**{name: record[name] for name in ("batches", "rows", "tokens", "epochs")})
    return "-".join(parts if done.reached(total) else [*parts, str(done.batches)])


def facets_of_name(name: str) -> Facets:
    """Parse a model's facets from its name. Raises a UserError if it doesn't have the format of the paper's names."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UserError(f"model {name}: expected a name such as 610m-clm-10k-mlm40-42k (docs/report.md)")
    size, phases, checkpoint = match["size"], match["phases"], match["checkpoint"]
    start = base_steps = clm_steps = 0
    continued_from, objectives, ratios = None, [], set[float | None]()
    for phase in _PHASE.finditer(phases):
        end = _steps(phase["end"])
        if end <= start:
            raise UserError(f"model {name}: {phase['end']} must be after {start:,} steps, which count from the start")
        if phase["decayed"]:
            # The phases before this one are those of the continued model.
            continued_from, base_steps = (size + phases[: phase.end()]).replace("-dec", "-"), end
            objectives, ratios, clm_steps = [], set(), 0
        else:
            objectives.append(phase["objective"][:3])
            ratios |= {int(phase["ratio"]) / 100} if phase["ratio"] else set()
            clm_steps += 0 if phase["ratio"] else end - start
        start = end
    steps = _steps(checkpoint) if checkpoint else start
    if not objectives or not base_steps < steps <= start:
        raise UserError(f"model {name}: expected steps from {base_steps + 1:,} to {start:,} at the end")
    objective, ratio = "-".join(objectives), _only(ratios)
    return Facets(size + phases, size, objective, ratio, clm_steps, start, steps, continued_from, base_steps)


def facets_of_config(name: str, config: PretrainConfig, base: Facets | None) -> Facets:
    """Return the facets of a run's final model; `base` has those of the continued model, if known.

    Raises a UserError if phases are in epochs or the size is unknown.
    """
    init_from, base_steps = config.model.init_from, 0
    if base is not None:
        checkpoint = _CHECKPOINT.match(str(init_from).rstrip("/").rpartition("/")[2])
        base_steps = base.base_steps + int(checkpoint[1]) if checkpoint else base.total_steps
    spans = resolve_phases(config.objective.phases, config.max_duration)
    for end in (span.end for span in spans if span.end.unit == "ep"):
        raise UserError(f"model {name}: {end} can't be given in steps before the data is read")
    batches = config.batch_shapes.batches
    clm_steps = sum(batches(span.end) - batches(span.start) for span in spans if span.phase.name == "clm")
    total = base_steps + batches(config.max_duration)
    objective = "-".join(span.phase.objective.name for span in spans)
    ratios = [span.phase.masking_ratio for span in spans if hasattr(span.phase, "masking_ratio")]
    ratio = _only({ratio if isinstance(ratio, float) else None for ratio in ratios})
    continued_from = base.run if base is not None else init_from
    return Facets(
        name, _size(name, config, base), objective, ratio, clm_steps, total, total, continued_from, base_steps
    )


def facets_of_models(
    names: list[str], configs: Mapping[str, PretrainConfig]
) -> tuple[dict[str, Facets], dict[str, str]]:
    """Return the models' facets, and for each model without facets the reason.

    They come from the run's configuration, otherwise from the model's name. `610m-mlm40-42k-5000` is a checkpoint of
    `610m-mlm40-42k` if that run has a configuration. A run continues the run whose folder its `model.init_from` names.
    """
    bases = {name: [p for p in (config.model.init_from or "").split("/") if p in configs and p != name][-1:]
             for name, config in configs.items()}  # fmt: skip
    runs, facets, problems = dict[str, Facets](), dict[str, Facets](), dict[str, str]()
    for name in TopologicalSorter(bases).static_order():
        try:
            runs[name] = facets_of_config(name, configs[name], next(map(runs.get, bases[name]), None))
        except UserError as error:
            problems[name] = str(error)
    for name in names:
        run, _, steps = name.rpartition("-")
        if name in runs:
            facets[name] = runs[name]
        elif steps.isdigit() and run in runs and runs[run].base_steps < int(steps) <= runs[run].total_steps:
            facets[name] = replace(runs[run], steps=int(steps))
        elif name not in problems:
            try:
                facets[name] = facets_of_name(name)
            except UserError as error:
                problems[name] = str(error)
    return facets, {name: problems[name] for name in names if name in problems}


def short_steps(steps: int) -> str:
    """Format a number of steps as in model names: `42k`, `500`."""
    return f"{steps / 1000:g}k" if steps >= 1000 and steps % 100 == 0 else str(steps)


def parameters_in_size(size: str) -> float:
    """Parse a size such as `610m` as a number of parameters, for sorting; infinity if it isn't a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", size)
    return float(match[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[match[2]] if match else float("inf")


def _steps(text: str) -> int:
    return round(float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1))


def _only(ratios: set[float | None]) -> float | None:
    return next(iter(ratios)) if len(ratios) == 1 else None


def _size(name: str, config: PretrainConfig, base: Facets | None) -> str:
    """Return the size from the preset, the continued model, the name, or the number of parameters."""
    if config.model.preset is not None or base is not None:
        return config.model.preset or base.size  # pyright: ignore[reportOptionalMemberAccess]
    try:
        return facets_of_name(name).size
    except UserError as error:
        architecture = architecture_of(config.model)
        if architecture is None:
            unknown = "its size is not known, because model.init_from is not a model of the study"
            raise UserError(f"{error}; {unknown}") from None
        return f"{architecture.parameters / 1e6:.3g}m"
