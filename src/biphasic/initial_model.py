"""Build the network that a YAML's `model:` section describes, with new weights or those of another model."""

from biphasic.config.model import DEFAULT_ROPE_THETA, ModelConfig, architecture_of
from biphasic.data.tokenizer import Tokenizer
from biphasic.errors import UserError
from biphasic.model.backbone import load_language_model
from biphasic.model.language_model import LanguageModel, from_hf_config, llama_config
from biphasic.model.new_vocabulary import fit_vocabulary


def build_language_model(
    config: ModelConfig, sequence_length: int, seed: int, tokenizer: Tokenizer | None = None, on_meta: bool = False
) -> LanguageModel:
    """Build or load the network that a YAML's `model:` section describes, on the CPU in fp32.

    New weights depend only on the seed. A loaded model's embedding is enlarged or rebuilt for `tokenizer`, the data's. With
    `on_meta`, a new model is built on the meta device, for ranks that receive their weights from rank 0. Raises a UserError
    if a model can't be loaded, or its positions, `rope_theta` or vocabulary don't fit.
    """
    if config.init_from is not None:
        # Never with the model's own code, since a checkpoint's network is built without it.
        positions = config.rope_theta, config.max_position_embeddings, sequence_length
        model = load_language_model(config.init_from, False, None, *positions)
        if tokenizer is not None:
            fit_vocabulary(model, config.init_from, tokenizer, rebuild=config.new_vocabulary is not None)
        return model
    size = architecture_of(config)
    assert size is not None, "the configuration's checks require dimensions"
    if tokenizer is not None and tokenizer.vocab_size > size.vocab_size:
        raise UserError(
            f"model.vocab_size is {size.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens: set "
            f"model.vocab_size to at least {tokenizer.vocab_size}"
        )
    hf_config = llama_config(
        size,
        config.max_position_embeddings or sequence_length,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_theta or DEFAULT_ROPE_THETA,
        initializer_range=config.initializer_range,
    )
    return from_hf_config(hf_config, seed, "meta" if on_meta else None)
