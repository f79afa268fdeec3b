"""Compare a model's tokenizer with that of the data, at the start of a run and in its plan."""

from biphasic.data.tokenizer import Tokenizer

_TEXTS, _TEXT_TOKENS = 500, 8
"""Number of texts that two tokenizers are compared on, and of tokens that one is made of."""


def vocabulary_problem(place: str, old: Tokenizer, new: Tokenizer, *, rebuild: bool) -> str | None:
    """Return why the model from `place`, with the tokenizer `old`, can't be trained on data of `new`; None if it can.

    `rebuild`: whether embedding and head would be rebuilt, by `new_vocabulary`.
    """
    if old.sha256 == new.sha256:
        return f"model.new_vocabulary: {place} already has the tokenizer {new.source}: remove the key" if rebuild else None
    if rebuild or not (difference := _difference(old, new)):
        return None
    problem = f"{new.source} is not that of model.init_from, {place} ({difference})"
    advice = "or set model.new_vocabulary=overlap to rebuild embedding and head"
    return f"tokenizer: {problem}: convert the data with the model's own, {advice}"


def _difference(old: Tokenizer, new: Tokenizer) -> str:
    """Return how a tokenizer differs from `old`, or an empty text. Tokens may be added, and special ones be renamed.

    Encodings of texts are compared too: another normalizer, pre-tokenizer or order of merges also gives other ids.
    """
    names = {token_id: token for token, token_id in old.tokenizer.get_vocab().items()}
    names |= dict.fromkeys((*old.special_ids, *new.special_ids))
    vocabulary = new.tokenizer.get_vocab().items()
    if other := sum(names.get(token_id, token) not in (token, None) for token, token_id in vocabulary):
        return f"{other:,} ids are those of other tokens"
    ids = [token_id for token_id, name in sorted(names.items()) if name is not None]
    for start in range(0, len(ids), max(len(ids) // _TEXTS, _TEXT_TOKENS)):
        text = old.tokenizer.decode(ids[start : start + _TEXT_TOKENS])
        [before], [after] = old.encode([text]), new.encode([text])
        if before != after and all(token_id in names for token_id in after):
            shown = [[tokenizer.tokenizer.id_to_token(id) for id in part[:_TEXT_TOKENS]]
                     for tokenizer, part in ((new, after), (old, before))]  # fmt: skip
            return f"of {text!r} it makes {shown[0]}, and the model's {shown[1]}"
    return ""
