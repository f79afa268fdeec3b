"""Draw a study's tree as SVG: time to the right, a line for each run, colored by objective, with its branch points."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from xml.sax.saxutils import escape

from biphasic.config.plan import batches_of
from biphasic.config.pretrain import PretrainConfig
from biphasic.config.study import StudyConfig
from biphasic.config.study_models import expand
from biphasic.config.timeline import MLMPhase, Phase, RampConfig, decay_start, spans
from biphasic.study.tree import StudyRun, study_tree

_ROW, _WIDTH, _MARGIN, _TOP, _BOTTOM, _LABELS = 18, 900, 20, 58, 44, 220
"""Pixels: height of a run's row, width of the time axis, margins, and width of the names behind the lines."""
_LINE = 7.0
_CLM, _MLM_LOW, _MLM_HIGH = (46, 110, 180), (250, 190, 110), (200, 60, 20)
"""Colors (red, green, blue) of CLM, and of MLM at masking ratios of 10% and 60%."""


@dataclass(frozen=True)
class _Stretch:
    """Consecutive batches of a run with one objective, in batches since the start of training."""

    first: int
    end: int
    phase: Phase


@dataclass(frozen=True)
class _Line:
    """A run's row, and its time before its history begins (`offset`: the length of the models that it continues)."""

    run: StudyRun
    row: int
    offset: int


def draw_study(study: StudyConfig) -> str:
    """Return the tree of a checked study as the text of an SVG file.

    Raises:
        UserError: two models have the same history.
    """
    configs = expand(study)
    return draw_tree(study_tree(configs, study.continues, study.stages.checkpoints), configs)


def draw_tree(tree: Mapping[str, StudyRun], configs: Mapping[str, PretrainConfig]) -> str:
    """Return the tree as the text of an SVG file."""
    lines = {line.run.name: line for line in _rows(tree)}
    length = max(line.offset + line.run.length for line in lines.values())
    height = _TOP + _ROW * len(lines) + _BOTTOM
    width = 2 * _MARGIN + _WIDTH + _LABELS

    def x(batch: float) -> float:
        return round(_MARGIN + _WIDTH * batch / length, 1)

    def y(name: str) -> float:
        return _TOP + _ROW * (lines[name].row + 0.5)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        *_legend(configs),
    ]
    for batch in _ticks(length):
        bottom = height - _BOTTOM + 6
        parts.append(f'<path d="M{x(batch)} {_TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x(batch)}" y="{bottom + 14}" text-anchor="middle" fill="#555">{batch:,}</text>')
    parts.append(f'<text x="{_MARGIN}" y="{height - 6}" fill="#555">batches</text>')
    for name, line in lines.items():
        above = line.run.parent or line.run.continues
        if above is not None:
            dashes = ' stroke-dasharray="3 3"' if line.run.parent is None else ""
            begin = x(line.offset + line.run.start)
            parts.append(f'<path d="M{begin} {y(above)}V{y(name)}" stroke="#777"{dashes}/>')
    for name, line in lines.items():
        config, middle = configs[name], y(name)
        decay = line.offset + batches_of(decay_start(config.schedule, config.max_duration), config)
        parts.append(f"<g><title>{escape(name)}: batches {line.run.start:,} to {line.run.length:,}</title>")
        for stretch in _stretches(line, config):
            parts += _band(stretch, decay, line.offset + line.run.length, x, middle)
        end = x(line.offset + line.run.length)
        style = 'paint-order="stroke" stroke="white" stroke-width="3"'
        parts.append(f'<text x="{end + 7}" y="{middle + 4}" {style}>{escape(name)}</text></g>')
    for name, line in lines.items():
        points = {line.offset + batch for batch in line.run.kept}
        points |= {other.offset for other in lines.values() if other.run.continues == name and other.run.parent is None}
        parts += [
            f'<circle cx="{x(point)}" cy="{y(name)}" r="4" fill="white" stroke="black"/>' for point in sorted(points)
        ]
    return "\n".join([*parts, "</svg>", ""])


def _rows(tree: Mapping[str, StudyRun]) -> Iterator[_Line]:
    """Yield the runs in the order of their rows: below each run those that start from it, the latest start first.

    A connection then crosses no line of another run that starts from the same one.
    """
    offsets: dict[str, int] = {}
    for run in tree.values():
        offsets[run.name] = 0 if run.continues is None else offsets[run.continues] + tree[run.continues].length
    below: dict[str | None, list[StudyRun]] = {}
    for run in tree.values():
        below.setdefault(run.parent or run.continues, []).append(run)
    pending, row = list(reversed(below[None])), 0
    while pending:
        run = pending.pop()
        yield _Line(run, row, offsets[run.name])
        row += 1
        pending += sorted(below.get(run.name, []), key=lambda child: offsets[child.name] + child.start)


def _stretches(line: _Line, config: PretrainConfig) -> Iterator[_Stretch]:
    for span in spans(config.objective.phases, config.max_duration):
        first, end = max(batches_of(span.start, config), line.run.start), batches_of(span.end, config)
        if first < end:
            yield _Stretch(line.offset + first, line.offset + end, span.phase)


def _band(stretch: _Stretch, decay: int, end: int, x: Callable[[float], float], middle: float) -> Iterator[str]:
    """Yield a band of constant height up to the decay, and one that narrows to the end of the run."""
    color = _color(stretch.phase)
    if stretch.first < min(stretch.end, decay):
        left, right = x(stretch.first), x(min(stretch.end, decay))
        yield f'<rect x="{left}" y="{middle - _LINE / 2}" width="{round(right - left, 1)}" height="{_LINE}" fill="{color}"/>'
    if stretch.end > decay:
        first = max(stretch.first, decay)
        corners = [(batch, _LINE / 2 * (1 - 0.8 * (batch - decay) / (end - decay))) for batch in (first, stretch.end)]
        (left, high), (right, low) = [(x(batch), round(half, 1)) for batch, half in corners]
        points = f"{left},{middle - high} {right},{middle - low} {right},{middle + low} {left},{middle + high}"
        yield f'<polygon points="{points}" fill="{color}"/>'


def _color(phase: Phase) -> str:
    if not isinstance(phase, MLMPhase):
        return f"rgb{_CLM}".replace(" ", "")
    share = min(max((_ratio(phase) - 0.1) / 0.5, 0.0), 1.0)
    mixed = tuple(round(low + share * (high - low)) for low, high in zip(_MLM_LOW, _MLM_HIGH, strict=True))
    return f"rgb{mixed}".replace(" ", "")


def _ratio(phase: MLMPhase) -> float:
    ratio = phase.masking_ratio
    return (ratio.start + ratio.end) / 2 if isinstance(ratio, RampConfig) else ratio


def _legend(configs: Mapping[str, PretrainConfig]) -> Iterator[str]:
    entries: dict[str, str] = {}
    phases = [phase for config in configs.values() for phase in config.objective.phases]
    for phase in sorted(phases, key=lambda phase: _ratio(phase) if isinstance(phase, MLMPhase) else 0.0):
        entries.setdefault(f"MLM {_ratio(phase):.0%}" if isinstance(phase, MLMPhase) else "CLM", _color(phase))
    left = _MARGIN
    for label, color in entries.items():
        yield f'<rect x="{left}" y="16" width="22" height="{_LINE}" fill="{color}"/>'
        yield _label(left + 28, label)
        left += 100
    yield f'<polygon points="{left},16 {left + 22},19 {left + 22},20 {left},23" fill="#777"/>'
    yield _label(left + 28, "decay")
    yield f'<circle cx="{left + 108}" cy="20" r="4" fill="white" stroke="black"/>'
    yield _label(left + 120, "others start here")
    yield f'<path d="M{left + 250} 20h22" stroke="#777" stroke-dasharray="3 3"/>'
    yield _label(left + 278, "new optimizer and schedule")


def _label(left: float, text: str) -> str:
    return f'<text x="{left}" y="24">{text}</text>'


def _ticks(length: int) -> range:
    """Return about ten round numbers up to `length`."""
    step = next(size * 10**power for power in range(12) for size in (1, 2, 5) if size * 10**power * 10 >= length)
    return range(0, length + 1, step)
