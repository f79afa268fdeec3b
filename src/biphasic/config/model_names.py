"""Name models, and find what distinguishes those of a study: size, objective, masking ratio, steps, continued model."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from biphasic.config.model import architecture_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.durations import Duration, TrainingProgress
from biphasic.errors import UserError
from biphasic.timeline import resolve_phases

_CHECKPOINT = re.compile(r"(?:ep\d+-)?ba(\d+)(?=-|$)")
"""Name of a checkpoint: `ba18000-rank0.pt`, or the folder `ep0-ba18000`."""


@dataclass(frozen=True)
class Facets:
    """What distinguishes a model from the other models of its study."""

    run: str
    """Name of the run: the model's name without a checkpoint's steps."""
    size: str
    """`210m`, `610m`, `1b`, or another number of parameters; `unknown` for a decoder that is not of the study."""
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


def facets_of_models(
    names: Iterable[str], configs: Mapping[str, PretrainConfig]
) -> tuple[dict[str, Facets], dict[str, str]]:
    """Return the facets of models by the configurations of their runs, and for a run without facets the reason.

    `610m-mlm40-42k-5000` is a checkpoint of the run `610m-mlm40-42k`. A run continues the run whose folder its
    `model.init_from` names. A model without a configuration has neither facets nor a reason.
    """
    bases = {name: [p for p in (config.model.init_from or "").split("/") if p in configs and p != name][-1:]
             for name, config in configs.items()}  # fmt: skip
    runs, problems = dict[str, Facets](), dict[str, str]()
    for name in TopologicalSorter(bases).static_order():
        try:
            runs[name] = _facets_of_run(name, configs[name], next(map(runs.get, bases[name]), None))
        except UserError as error:
            problems[name] = str(error)
    facets = dict[str, Facets]()
    for name in names:
        run, _, steps = name.rpartition("-")
        if name in runs:
            facets[name] = runs[name]
        elif steps.isdigit() and run in runs and runs[run].base_steps < int(steps) <= runs[run].total_steps:
            facets[name] = replace(runs[run], steps=int(steps))
    return facets, {name: problems[name] for name in names if name in problems}


def short_steps(steps: int) -> str:
    """Format a number of steps as in model names: `42k`, `500`."""
    return f"{steps / 1000:g}k" if steps >= 1000 and steps % 100 == 0 else str(steps)


def parameters_in_size(size: str) -> float:
    """Parse a size such as `610m` as a number of parameters, for sorting; infinity if it isn't a number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", size)
    return float(match[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[match[2]] if match else float("inf")


def _facets_of_run(name: str, config: PretrainConfig, base: Facets | None) -> Facets:
    """Return the facets of a run's final model; `base` has those of the continued model, if known."""
    init_from, base_steps, architecture = config.model.init_from, 0, architecture_of(config.model)
    size = config.model.preset or (f"{architecture.parameters / 1e6:.3g}m" if architecture is not None else "unknown")
    if base is not None:
        checkpoint = _CHECKPOINT.match(str(init_from).rstrip("/").rpartition("/")[2])
        base_steps = base.base_steps + int(checkpoint[1]) if checkpoint else base.total_steps
        size = base.size
    spans = resolve_phases(config.objective.phases, config.max_duration)
    for end in (span.end for span in spans if span.end.unit == "ep"):
        raise UserError(f"model {name}: {end} can't be given in steps before the data is read")
    batches = config.batch_shapes.batches
    total = base_steps + batches(config.max_duration)
    ratios = {span.phase.masking_ratio for span in spans if hasattr(span.phase, "masking_ratio")}
    ratio = ratios.pop() if len(ratios) == 1 else None
    return Facets(
        run=name,
        size=size,
        objective="-".join(span.phase.objective.name for span in spans),
        masking_ratio=ratio if isinstance(ratio, float) else None,
        clm_steps=sum(batches(span.end) - batches(span.start) for span in spans if span.phase.name == "clm"),
        total_steps=total,
        steps=total,
        continued_from=base.run if base is not None else init_from,
        base_steps=base_steps,
    )
