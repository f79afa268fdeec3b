"""Read from a config.json how long a model's rotary positions are right. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast


class RopeThreshold(NamedTuple):
    """Type of rotary positions that depend on a call's longest segment beyond a `length`, and its key in config.json."""

    kind: str
    key: str
    length: int


def rope_threshold(content: Mapping[str, Any]) -> RopeThreshold | None:
    """Return from which length on a model's rotary positions depend on a call's longest segment; None if they don't.

    transformers chooses the frequencies of `longrope` and `dynamic` by the longest position of the whole call. `content`
    is a config.json, or a Hugging Face configuration as a dictionary.
    """
    rope, found = content.get("rope_scaling") or content.get("rope_parameters"), list[RopeThreshold]()
    original, positions = "original_max_position_embeddings", cast(Any, content.get("max_position_embeddings"))
    of_layers = (rope, *rope.values()) if isinstance(rope, dict) else ()  # there may be one for each layer type
    for each in (each for each in of_layers if isinstance(each, dict)):
        kind = str(each.get("rope_type") or each.get("type"))
        # Phi-3's older names are others.
        if kind == "longrope" or (kind in ("su", "yarn") and content.get("model_type") == "phi3"):
            found += [RopeThreshold("longrope", original, at.get(original, positions)) for at in (content, each)]
        elif "dynamic" in kind and "alpha" not in each:  # with Hunyuan's `alpha` they are constant
            found.append(RopeThreshold(kind, "max_position_embeddings", positions))
    return min((each for each in found if isinstance(each.length, int)), key=lambda each: each.length, default=None)


def rows_problem(path: str, content: Mapping[str, Any], longest: int, max_positions: int | None) -> str | None:
    """Return why the model of `model.init_from` can't be trained on rows of up to `longest` tokens; None if it can.

    `content` is as in `rope_threshold`, and `max_positions` is the YAML's `model.max_position_embeddings`.
    """
    own, rope = content.get("max_position_embeddings"), rope_threshold(content)
    # Another maximum would change LongRoPE's scale, and the threshold of `dynamic`.
    if rope is not None and (longest > rope.length or max_positions not in (None, own)):
        return (
            f"model.init_from: {path} has rotary positions of type {rope.kind}: in rows longer than its {rope.key} "
            f"({rope.length}), a document's would depend on the other documents of its microbatch. Set data.sequence_length "
            f"(also of phases; the longest is {longest}) to at most {rope.length} and leave model.max_position_embeddings "
            'out, or remove the scaling from its config.json ("rope_type": "default")'
        )
    positions = max_positions or own
    if isinstance(positions, int) and positions < longest:
        return (
            f"data.sequence_length is {longest}, but {path} is for sequences of up to {positions} tokens: set "
            f"model.max_position_embeddings={longest}, and a larger model.rope_theta (recipes/long_context)"
        )
    return None
