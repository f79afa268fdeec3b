"""Prove what a transformers model's outputs depend on: the future, other segments of a packed row, or padding.

One token at a time is changed, and the outputs that change are those that see it. This shows the attention that a model
really computes, whatever its configuration, its mask and its documentation say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from biphasic.errors import UserError, first_line
from biphasic.model.packing_probe import packed_attention
from biphasic.quiet import without_warnings

_SEGMENT = 4
"""Number of tokens in each of two segments of the probed row."""
_CHANGE = 1e-5
"""Smallest change of an output that counts, relative to the largest output. Rounding differs by less."""
_BY_POSITIONS = "position_ids", "position_ids, use_cache=False"
REQUIREMENTS = ("causal", "bidirectional", "segments", "padding")


@dataclass(frozen=True)
class AttentionCheck:
    """What the outputs depend on if a model is called in one way. None: not asked in this way.

    Attributes:
        way: how attention is asked for.
        direction: `causal`, `bidirectional`, or `own`: the model's own.
        future: whether a token's output depends on later tokens of its segment.
        other_segments: whether it depends on tokens of other segments of the row.
        padding: whether it depends on padding.
        error: why the model can't be called in this way.
    """

    way: str
    direction: str
    future: bool | None = None
    other_segments: bool | None = None
    padding: bool | None = None
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """What is wrong, in words; None if the outputs depend on what was asked for."""
        if self.error is not None:
            return None
        problems = {
            "sees the future": self.direction == "causal" and self.future,
            "doesn't see the future": self.direction == "bidirectional" and self.future is False,
            "sees other segments": self.other_segments,
            "sees padding": self.padding,
        }
        return ", ".join(words for words, is_wrong in problems.items() if is_wrong) or None


@dataclass(frozen=True)
class AttentionReport:
    """The results of `check_attention`. `str` gives them as a table."""

    family: str
    attention: str
    """transformers' name of the attention function that the model's own ways were computed with."""
    versions: str
    checks: tuple[AttentionCheck, ...]

    @property
    def problems(self) -> list[str]:
        """What is wrong in each way, in words."""
        return [f"{each.way} ({each.direction}): {each.problem}" for each in self.checks if each.problem]

    def __str__(self) -> str:
        marks = {None: "", True: "yes", False: "no"}
        rows = [("asked for by", "direction", "future", "other segments", "padding", "")]
        rows += [
            (each.way, each.direction, *(marks[x] for x in (each.future, each.other_segments, each.padding)),
             f"can't be called so: {each.error}" if each.error else "WRONG: " + each.problem if each.problem else "")
            for each in self.checks
        ]  # fmt: skip
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]) for row in rows
        ]
        title = f"{self.family}, attention {self.attention}, {self.versions}: does an output depend on"
        return "\n".join([title, *(line.rstrip() for line in lines)])


def check_attention(model: Any, require: str | Sequence[str] = ()) -> AttentionReport:
    """Report what the outputs of a transformers model depend on, in each way to ask for it. Takes about a second.

    Args:
        model: a text encoder or decoder, with or without a head, on any device. It is left as it was.
        require: what must hold, or a ValueError is raised: `causal` (no output depends on the future, unless it was asked
            for), `bidirectional` (the model's own attention sees the future), `segments` (with `position_ids` and no
            cache, no output depends on another segment of its row), `padding` (none depends on padding).

    Raises:
        ValueError: a requirement isn't met, or its name is unknown.
    """
    required = (require,) if isinstance(require, str) else tuple(require)
    for name in required:
        if name not in REQUIREMENTS:
            raise ValueError(f"require: expected {', '.join(REQUIREMENTS)}; got {name!r}")
    import transformers

    own, was_training = model.config._attn_implementation, model.training
    try:
        with torch.no_grad(), without_warnings():
            checks = tuple(_checks(model.eval()))
    finally:
        model.train(was_training)
    report = AttentionReport(
        model.config.model_type, str(own), f"transformers {transformers.__version__}, torch {torch.__version__}", checks
    )
    by_positions = [c.way for c in checks if c.way in _BY_POSITIONS][-1]
    faults = {
        "causal": [c for c in checks if c.future and (c.direction == "causal" or c.way == "input_ids alone")],
        "bidirectional": [c for c in checks if c.future is False and c.way == "input_ids alone"],
        "segments": [c for c in checks if c.way == by_positions and (c.other_segments or c.error)],
        "padding": [c for c in checks if c.padding],
    }
    if missed := [f"{name} ({', '.join(c.way for c in faults[name])})" for name in required if faults[name]]:
        raise ValueError(f"{type(model).__name__}: required, but not so: {'; '.join(missed)}\n{report}")
    return report


def load_for_check(path: str, attention: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the model of a Hugging Face folder or hub id, with the head that its configuration names, on the CPU.

    `attention` is transformers' name of an attention function. Default: the model's own. Raises a UserError if the model
    can't be loaded.
    """
    import transformers

    try:
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        config = transformers.AutoConfig.from_pretrained(path, **options)
        name = (getattr(config, "architectures", None) or [""])[0]
        kind = getattr(transformers, name, transformers.AutoModel)
        return kind.from_pretrained(path, **options, **({"attn_implementation": attention} if attention else {}))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise UserError(f"model {path}: can't be loaded ({first_line(error)})") from None


def _checks(model: Any) -> Iterator[AttentionCheck]:
    size, device, dtype = 2 * _SEGMENT, next(model.parameters()).device, next(model.parameters()).dtype
    tokens = _tokens(model, size).to(device)
    segment = torch.arange(size, device=device) // _SEGMENT
    same, later = segment[:, None] == segment[None], torch.ones(size, size, dtype=torch.bool, device=device).triu(1)

    def check(way: str, direction: str, part: Callable[[Tensor], dict[str, Any]], call: Callable[[Tensor], Any]) -> Any:
        try:
            return AttentionCheck(way, direction, **part(_influence(call, tokens, model)))
        except Exception as error:  # a family's code may raise anything
            return AttentionCheck(way, direction, error=f"{type(error).__name__}: {first_line(error)[:80]}")

    def packed(seen: Tensor) -> dict[str, Any]:
        return {"future": bool((seen & later & same).any()), "other_segments": bool((seen & ~same).any())}

    def whole(seen: Tensor) -> dict[str, Any]:
        return {"future": bool((seen & later).any())}

    yield check("input_ids alone", "own", whole, lambda ids: model(input_ids=ids))
    for side, is_text in (("right", segment == 0), ("left", segment == 1)):

        def padded(seen: Tensor, is_text: Tensor = is_text) -> dict[str, Any]:
            of_text = seen[is_text]
            return {
                "future": bool((seen & later)[is_text][:, is_text].any()),
                "padding": bool(of_text[:, ~is_text].any()),
            }

        mask = is_text.long()
        way = f"attention_mask, {side} padding"
        yield check(way, "own", padded, lambda ids, mask=mask: model(input_ids=ids, attention_mask=mask.expand_as(ids)))
    positions = torch.arange(_SEGMENT, device=device).repeat(2)
    # A cache, the default of decoders, makes transformers ignore that positions begin anew.
    for way, options in ((_BY_POSITIONS[0], {}), (_BY_POSITIONS[1], {"use_cache": False})):
        if options and not hasattr(model.config, "use_cache"):
            continue
        yield check(
            way,
            "own",
            packed,
            lambda ids, options=options: model(input_ids=ids, position_ids=positions.expand_as(ids), **options),
        )
    for direction, visible in (("causal", same & ~later), ("bidirectional", same)):
        bias = torch.zeros(size, size, dtype=dtype, device=device).masked_fill(~visible, torch.finfo(dtype).min)
        yield check(
            "a mask of four dimensions",
            direction,
            packed,
            lambda ids, bias=bias: model(
                input_ids=ids, position_ids=positions.expand_as(ids), attention_mask=bias.expand(len(ids), 1, -1, -1)
            ),
        )
    with _own_attention_kept(model):
        try:
            forward = packed_attention(model)
        except Exception as error:  # families without replaceable attention raise others than UserErrors
            yield AttentionCheck("biphasic.packed_attention", "both", error=first_line(error)[:120])
            return
        for direction in ("causal", "bidirectional"):
            yield check(
                "biphasic.packed_attention",
                direction,
                packed,
                lambda ids, causal=direction == "causal": forward(ids, (segment + 1).expand_as(ids), causal),
            )


@contextmanager
def _own_attention_kept(model: Any) -> Iterator[None]:
    own = model.config._attn_implementation
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def _tokens(model: Any, count: int) -> Tensor:
    """Return distinct token ids that are not the padding token, from which some families compute positions."""
    vocabulary, pad_id = model.get_input_embeddings().weight.shape[0], getattr(model.config, "pad_token_id", None)
    ids = [token for token in range(vocabulary) if token != pad_id]
    step = max(len(ids) // (2 * count), 1)
    return torch.tensor([ids[(step * (index + 1)) % len(ids)] for index in range(count)])


def _influence(call: Callable[[Tensor], Any], tokens: Tensor, model: Any) -> Tensor:
    """Return which outputs depend on which tokens, bool [outputs, tokens], by a batch with one token changed in each row."""
    count = len(tokens)
    rows = tokens.repeat(count + 1, 1)
    other = _tokens(model, count + 1)[-1].to(tokens.device)
    rows[1:].diagonal().fill_(other)
    output = call(rows)
    if not isinstance(output, Tensor):
        hidden = getattr(output, "last_hidden_state", None)
        output = output.logits if hidden is None else hidden
    output = output.float()
    if not output.isfinite().all():
        raise ValueError("the output has NaN or Inf")
    changed = (output[1:] - output[:1]).abs().amax(-1) > _CHANGE * output.abs().max()
    return changed.T
