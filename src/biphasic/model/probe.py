"""Find out what a transformers model's outputs depend on: the future, other segments of a packed row, or padding.

One token at a time is changed, and the outputs that change are those that see it. This shows the attention that a model
really computes, whatever its configuration, its mask and its documentation say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from biphasic.errors import UserError, first_line
from biphasic.model import attention
from biphasic.model.architecture import RopeThreshold, rope_threshold
from biphasic.model.forward import packed_forward, padded_forward
from biphasic.model.segments import Segments, limited_lengths, reserved_positions, run_lengths, visibility_mask
from biphasic.quiet import without_warnings
from biphasic.storage import user_errors

if TYPE_CHECKING:
    from biphasic.model.language_model import LanguageModel

_SEGMENT = 4
"""Number of tokens in each of the two segments of a probed row."""
_TOLERANCE = 1e-3
"""Maximum difference from the family's own attention, relative to the largest absolute output."""
_ROUNDING = 1e-5
"""Maximum difference due to rounding, relative to the largest absolute output. In mixtures of experts, a token's rounding
depends on the other tokens."""
_MAX_FLOPS, _MAX_WINDOW = 1e12, 1024
"""Limits of a forward pass over segments longer than a sliding window, seconds on a CPU."""
REQUIREMENTS = ("causal", "bidirectional", "segments", "padding")
_BY_POSITIONS = "position_ids", "position_ids, use_cache=False"


def _tokens(model: Any, count: int) -> Tensor:
    """Return distinct token ids, if there are as many, but never padding, from which some families compute positions."""
    weight, pad_id = model.get_input_embeddings().weight, getattr(model.config, "pad_token_id", None)
    ids = [token for token in range(weight.shape[0]) if token != pad_id]
    step = max(len(ids) // (2 * count), 1)
    return torch.tensor([ids[step * index % len(ids)] for index in range(1, count + 1)], device=weight.device)


def _differs(output: Tensor, expected: Tensor, tolerance: float = _ROUNDING) -> Tensor:
    """Return where the outputs [..., width] of a token differ, bool [...]."""
    return (output - expected).abs().amax(-1) > tolerance * expected.abs().max()


def _influence(call: Callable[[Tensor], Tensor], model: Any, changed: Sequence[int] = range(2 * _SEGMENT)) -> Tensor:
    """Return which outputs of two segments depend on which tokens, bool [outputs, changed tokens].

    `call` takes token ids, int64 [rows, tokens], one of which is changed in each row but the first, and returns outputs
    [rows, tokens, width].
    """
    tokens = _tokens(model, 2 * _SEGMENT + 1)
    rows = tokens[:-1].repeat(len(changed) + 1, 1)
    for row, index in enumerate(changed, 1):
        rows[row, index] = tokens[-1]
    output = call(rows).float()
    if not output.isfinite().all():
        raise ValueError("the output has NaN or Inf")
    return _differs(output[1:], output[:1]).T


def _packed(backbone: nn.Module, causal: bool, lengths: Sequence[int], rows: Tensor) -> Tensor:
    """Compute the hidden states of rows, each by itself, with segments of these lengths."""
    segments = Segments.of(lengths, rows.device)
    return torch.stack([packed_forward(backbone, row, segments, causal) for row in rows]).float()


@contextmanager
def _attention(model: Any, name: str, after: str) -> Iterator[None]:
    """Use an attention function within the context, and another one `after` it."""
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(after)


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Use a model's bf16 and fp16 weights in fp32 within the context, because their rounding hides wrong attention.

    In bf16, right models of 8 layers differ from their own attention by up to 3%, and wrong ones by as little as 1%.
    """
    halves = [each for each in (*model.parameters(), *model.buffers()) if each.dtype in (torch.float16, torch.bfloat16)]
    own = [each.data for each in halves]
    try:
        for each in halves:
            each.data = each.data.float()
        yield
    finally:
        for each, data in zip(halves, own, strict=True):
            each.data = data


@torch.no_grad()
def packing_problem(backbone: Any, decoder: bool = True, longest: int | None = None) -> str | None:
    """Return why a backbone can't compute packed segments, for an error message; None if there is no problem.

    A token of each of two short segments is changed, with causal and with bidirectional attention. This detects families
    whose layers don't call the registered attention function, leak between segments, or can't be made causal or
    bidirectional (convolutions, state spaces). A third segment at a row's last position shows whether positions depend on
    other segments. Last, hidden states are compared with those of the family's own attention, also in segments on both
    sides of each sliding window, if that is cheap.

    Args:
        backbone: a Hugging Face base model with `biphasic` attention, in evaluation mode.
        decoder: whether the family's own attention is causal.
        longest: number of tokens in the longest segment. Default: the model's own limit.
    """
    pair = [_SEGMENT, _SEGMENT]
    rope = rope_threshold(backbone.config.to_dict())
    own: int | None = getattr(backbone.config, "max_position_embeddings", None) if rope is None else rope.length
    longest = longest or (own or _SEGMENT) - reserved_positions(backbone)
    try:
        for causal in (not decoder, decoder):
            # The last token of the first segment, and the first token of the second.
            changed = [_SEGMENT - 1, _SEGMENT]
            seen = _influence(partial(_packed, backbone, causal, pair), backbone, changed)
            if seen[:_SEGMENT, 1].any() or seen[_SEGMENT:, 0].any():
                return "tokens attend to other segments"
            visible = visibility_mask(_SEGMENT, causal, 0, seen.device)
            if not seen.equal(torch.block_diag(visible, visible)[:, changed]):
                return f"its layers can't be made {'causal' if causal else 'bidirectional'}"
        tokens = _tokens(backbone, 2 * _SEGMENT)
        segments = Segments.of([*pair, 1], tokens.device)
        segments.position_ids[-1] = longest - 1
        far = packed_forward(backbone, torch.cat([tokens, tokens[:1]]), segments, decoder).float()
        if _differs(far[:-1], _packed(backbone, decoder, pair, tokens[None])[0]).any():
            return "its positions depend on the longest segment of a call"
        lengths = _lengths(backbone, longest)
        tokens = _tokens(backbone, sum(lengths))
        hidden = _packed(backbone, decoder, lengths, tokens[None])[0]
        with _attention(backbone, "eager", after=attention.ATTENTION_NAME):
            texts = [backbone(input_ids=text[None], use_cache=False) for text in tokens.split(lengths)]
        expected = torch.cat([text.last_hidden_state[0] for text in texts]).float()
        if _differs(hidden, expected, _TOLERANCE).any():
            return "its hidden states are not those of its own attention"
    except attention.NotPackedError:
        return "its layers don't pass segments on to their attention function"
    except Exception as error:  # the family's code may raise anything
        return f"its code fails ({type(error).__name__}: {first_line(error)})"
    return None


def _lengths(backbone: Any, longest: int) -> list[int]:
    """Return lengths of segments on both sides of a backbone's thresholds below `longest`, if these are cheap."""
    chunk: int = getattr(backbone.config, "attention_chunk_size", None) or 0
    lengths, parameters = [_SEGMENT, _SEGMENT], sum(weight.numel() for weight in backbone.parameters())
    for threshold in sorted(attention.sliding_windows(backbone) | {chunk}):
        longer = [*lengths, threshold, min(threshold + 2, longest)]
        if 0 < threshold < min(longest, _MAX_WINDOW + 1) and 2 * parameters * sum(longer) <= _MAX_FLOPS:
            lengths = longer
    return lengths


@torch.no_grad()
def computes_own_logits(network: Any, model: LanguageModel) -> bool:
    """Return whether a language model has the logits of the Hugging Face class that its backbone and head come from.

    Some families scale or transform their logits in ways of their own, which a class's parameters don't show. `network` is
    the class with a head, with the same modules as `model`, which is in evaluation mode.
    """
    tokens = _tokens(model.backbone, 2 * _SEGMENT).view(2, _SEGMENT)
    with _attention(network, "eager", after=attention.ATTENTION_NAME):
        own = network(input_ids=tokens).logits
        logits = model.logits(model.backbone(input_ids=tokens).last_hidden_state)
    return not _differs(logits, own, _TOLERANCE).any()


@torch.no_grad()
def computes_head_logits(network: Any, head: nn.Module, separator_id: int) -> bool:
    """Return whether a Hugging Face class with a head, in evaluation mode, computes `head` of its encoder's states."""
    own, tokens = network.config._attn_implementation, _tokens(network.base_model, 3 * _SEGMENT)[None]
    tokens[:, _SEGMENT - 1 :: _SEGMENT] = separator_id
    name = "eager" if own == attention.ATTENTION_NAME else own
    with suppress(Exception), _attention(network, name, after=own):  # the family's code may raise anything
        expected, output = head(network.base_model(input_ids=tokens).last_hidden_state), network(input_ids=tokens)
        logits = torch.stack([output.start_logits, output.end_logits], -1) if "start_logits" in output else output.logits
        return not _differs(logits, expected, _TOLERANCE).any()
    return False


@torch.no_grad()
def is_bidirectional(encoder: nn.Module) -> bool:
    """Return whether a text's hidden states depend on later tokens, with the encoder's own attention."""

    def padded(rows: Tensor) -> Tensor:
        segments = Segments.of([rows.shape[1]] * len(rows), rows.device)
        return padded_forward(encoder, rows.flatten(), segments, pad_id=0).unflatten(0, rows.shape)

    return bool(_influence(padded, encoder).triu(1).any())


@torch.no_grad()
def switch_to_packed_attention(encoder: Any) -> bool:
    """Replace the attention of a Hugging Face encoder (BERT) by `biphasic` attention, if its family supports that.

    Packed hidden states are compared with padded ones of the encoder's own attention, on texts longer than its sliding
    window. If they differ, the encoder keeps its own attention, and the result is False. The encoder must have no
    pooler, and be in evaluation mode, on the CPU in fp32.
    """
    own, packs = encoder.config._attn_implementation, False
    with suppress(Exception), without_warnings():  # from families whose attention can't be replaced
        window: int = getattr(encoder.config, "sliding_window", None) or 0
        longest = min(max(2 * window, _SEGMENT) + _SEGMENT, encoder.config.max_position_embeddings // 2)
        lengths = (longest, _SEGMENT, longest - 1)
        tokens, segments = _tokens(encoder, sum(lengths)), Segments.of(lengths, torch.device("cpu"))
        if reserved := reserved_positions(encoder):
            tokens[[1, longest]] = reserved - 1  # texts may have the padding token, such as an EOS
        padded = padded_forward(encoder, tokens, segments, getattr(encoder.config, "pad_token_id", None) or 0)
        encoder.set_attn_implementation(attention.ATTENTION_NAME)
        packed = packed_forward(encoder, tokens, segments, causal=False)
        packs = packed.shape == padded.shape and not _differs(packed, padded).any()
    if not packs:
        encoder.set_attn_implementation(own)
    return packs


@torch.no_grad()
def sees_padding(encoder: nn.Module, pad_id: int) -> bool:
    """Return whether a text's hidden states depend on its padding, with the encoder's own attention, and so on its batch."""
    text = _tokens(encoder, 2 * _SEGMENT)
    length = len(text)
    alone = padded_forward(encoder, text, Segments.of([length], text.device), pad_id)
    padded = padded_forward(encoder, text.repeat(3), Segments.of([length, 2 * length], text.device), pad_id)
    return bool(_differs(padded[:length], alone, _TOLERANCE).any())


@torch.compiler.disable()  # lengths differ from batch to batch
def _segments_of(segment_ids: Tensor, rope: RopeThreshold | None) -> Segments:
    lengths = run_lengths(segment_ids) if rope is None else limited_lengths(segment_ids, rope)
    return Segments.of([length for row in lengths for length in row], segment_ids.device)


def packed_attention(model: Any) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Switch a Hugging Face model to attention over segments, in both directions, and return a function that computes it.

    The function takes token ids, int64 [rows, length], segment ids (1 for a row's first segment, 2 for the second, …; 0 for
    padding), and whether attention is causal. It returns the hidden states, [rows, length, width]. Tokens attend within
    their segment only, positions restart at each segment, and nothing is computed twice or masked on kernels for segments
    of any length.

    Raises:
        UserError: the model's layers can't be switched. Its own attention stays. The function raises one if a segment is so
            long that the model's positions would depend on the other segments.
    """
    attention.register()
    base = model.base_model
    backbone: Any = base.get_decoder() if hasattr(base, "get_decoder") else base
    own, was_training = backbone.config._attn_implementation, model.training
    with in_fp32(backbone):
        decoder = not is_bidirectional(backbone.eval())
        model.eval().set_attn_implementation(attention.ATTENTION_NAME)
        problem = packing_problem(backbone, decoder)
    model.train(was_training)
    if problem is not None:
        model.set_attn_implementation(own)
        raise UserError(f"{type(model).__name__} can't be computed on packed segments: {problem}")

    rope = rope_threshold(backbone.config.to_dict())

    def forward(input_ids: Tensor, segment_ids: Tensor, causal: bool) -> Tensor:
        segments = _segments_of(segment_ids, rope)
        return packed_forward(backbone, input_ids.flatten(), segments, causal).unflatten(0, input_ids.shape)

    return forward


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
        problems = {
            "sees the future": self.direction == "causal" and self.future,
            "doesn't see the future": self.direction == "bidirectional" and self.future is False,
            "sees other segments": self.other_segments,
            "sees padding": self.padding,
        }
        return ", ".join(words for words, is_wrong in problems.items() if is_wrong) or None


@dataclass(frozen=True)
class AttentionReport:
    """The results of `check_attention`. `str` gives them as a table below the `title`."""

    title: str
    checks: tuple[AttentionCheck, ...]

    @property
    def problems(self) -> list[str]:
        """What is wrong in each way, in words."""
        return [f"{each.way} ({each.direction}): {each.problem}" for each in self.checks if each.problem]

    def __str__(self) -> str:
        marks = {None: "", True: "yes", False: "no"}
        rows: list[tuple[str, ...]] = [("asked for by", "direction", "future", "other segments", "padding", "")]
        for each in self.checks:
            remark = f"WRONG: {each.problem}" if each.problem else ""
            remark = f"can't be called so: {each.error}" if each.error else remark
            seen = (marks[aspect] for aspect in (each.future, each.other_segments, each.padding))
            rows.append((each.way, each.direction, *seen, remark))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([self.title, *lines])


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
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    title = f"{model.config.model_type}, attention {own}, {versions}: does an output depend on"
    report = AttentionReport(title, checks)
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
    from safetensors import SafetensorError

    options = {"trust_remote_code": trust_remote_code}
    with user_errors(f"model {path}: can't be loaded", ValueError, ImportError, KeyError, RuntimeError, SafetensorError):
        config = transformers.AutoConfig.from_pretrained(path, **options)
        name = (getattr(config, "architectures", None) or [""])[0]
        kind = getattr(transformers, name, transformers.AutoModel)
        return kind.from_pretrained(path, attn_implementation=attention, **options)


def _checks(model: Any) -> Iterator[AttentionCheck]:
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    segment = torch.arange(2 * _SEGMENT, device=device) // _SEGMENT
    same, later = segment[:, None] == segment[None], torch.ones(2 * _SEGMENT, 2 * _SEGMENT, device=device).triu(1) > 0
    within_segments = {"future": later & same, "other_segments": ~same}

    def check(way: str, direction: str, aspects: dict[str, Tensor], call: Callable[[Tensor], Tensor]) -> AttentionCheck:
        try:
            seen = _influence(call, model)
        except Exception as error:  # a family's code may raise anything
            return AttentionCheck(way, direction, error=f"{type(error).__name__}: {first_line(error)[:80]}")
        results: dict[str, Any] = {name: bool((seen & pairs).any()) for name, pairs in aspects.items()}
        return AttentionCheck(way, direction, **results)

    yield check("input_ids alone", "own", {"future": later}, partial(_output, model, {}))
    for side, is_text in (("right", segment == 0), ("left", segment == 1)):
        aspects = {"future": later & is_text[:, None] & is_text[None], "padding": is_text[:, None] & ~is_text[None]}
        mask = {"attention_mask": is_text.long()[None]}
        yield check(f"attention_mask, {side} padding", "own", aspects, partial(_output, model, mask))
    positions = {"position_ids": torch.arange(_SEGMENT, device=device).repeat(2)[None]}
    yield check(_BY_POSITIONS[0], "own", within_segments, partial(_output, model, positions))
    if hasattr(model.config, "use_cache"):
        # A cache, the default of decoders, makes transformers ignore that positions begin anew.
        call = partial(_output, model, positions, use_cache=False)
        yield check(_BY_POSITIONS[1], "own", within_segments, call)
    for direction, visible in (("causal", same & ~later), ("bidirectional", same)):
        bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, torch.finfo(dtype).min)
        arguments = {**positions, "attention_mask": bias[None, None]}
        yield check("a mask of four dimensions", direction, within_segments, partial(_output, model, arguments))
    way, own = "biphasic.packed_attention", model.config._attn_implementation
    with _attention(model, own, after=own):
        try:
            forward = packed_attention(model)
        except Exception as error:  # families without replaceable attention raise others than UserErrors
            yield AttentionCheck(way, "both", error=first_line(error)[:120])
            return
        for direction in ("causal", "bidirectional"):
            call = partial(_packed_rows, forward, segment + 1, direction == "causal")
            yield check(way, direction, within_segments, call)


def _output(model: Any, of_each_row: dict[str, Tensor], rows: Tensor, **options: Any) -> Tensor:
    """Return a model's hidden states, or with a head its logits. Arguments `of_each_row` have a first dimension of 1."""
    arguments = {name: value.expand(len(rows), *value.shape[1:]) for name, value in of_each_row.items()}
    output = model(input_ids=rows, **arguments, **options)
    hidden = getattr(output, "last_hidden_state", None)
    return output.logits if hidden is None else hidden


def _packed_rows(forward: Callable[..., Tensor], segment_ids: Tensor, causal: bool, rows: Tensor) -> Tensor:
    return forward(rows, segment_ids.expand_as(rows), causal)
