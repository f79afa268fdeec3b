"""Folders as other software writes them, and what Biphasic makes of them.

`python reader_theirs.py write WORK` writes them with the packages of this process, without Biphasic, and
`python reader_theirs.py read WORK OUT` reads them with Biphasic. Folders of networks have their own software's outputs.
"""

import contextlib
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

IDS = [[5, 9, 44, 100, 7, 20, 33, 64, 12, 90, 11, 4, 8, 77], [9, 5]]
TEXTS = ["Rain IS here", "Copper bridges, 12 years old; it's quiet. " * 5]
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
DECODER = {**SIZES, "num_key_value_heads": 2}
GEMMA = {**DECODER, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
MODERN = {**SIZES, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("Llama", "ForCausalLM", DECODER),
    "Llama classifier": ("Llama", "ForSequenceClassification", DECODER),
    "Qwen 3": ("Qwen3", "ForCausalLM", {**DECODER, "head_dim": 8, **WINDOW, "tie_word_embeddings": True}),
    "Gemma 3": ("Gemma3", "ForCausalLM", GEMMA),
    "Gemma 3, bidirectional": ("Gemma3", "ForCausalLM", {**GEMMA, "use_bidirectional_attention": True}),
    "ModernBERT": ("ModernBert", "ForMaskedLM", MODERN),
    "ModernBERT classifier": ("ModernBert", "ForSequenceClassification", MODERN),
    "ModernBERT entities": ("ModernBert", "ForTokenClassification", MODERN),
    "BERT": ("Bert", "ForMaskedLM", SIZES),
    "BERT classifier": ("Bert", "ForSequenceClassification", {**SIZES, "num_labels": 1}),
    "BERT entities": ("Bert", "ForTokenClassification", SIZES),
}
"""The networks of transformers: family, class, configuration."""


def _network(family: str, kind: str, sizes: dict[str, Any], folder: Path, tokenizers: Path) -> None:
    import transformers

    config = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(family, f"{family}Config"))(**sizes)
    model = getattr(transformers, family + kind)(config).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    around = "modernbert" if family in ("Bert", "ModernBert") else "eurobert"
    file, names = tokenizers / f"{around}-tokenizer" / "tokenizer.json", {"pad_token": "[PAD]", "eos_token": "[SEP]"}
    names |= {"cls_token": "[CLS]", "sep_token": "[SEP]"} if around == "modernbert" else {}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), mask_token="[MASK]", **names)
    tokenizer.save_pretrained(folder)
    if kind in ("ForCausalLM", "ForMaskedLM"):
        # Of the folder as this version reads it again, in an attention without kernels.
        with torch.no_grad():
            model = getattr(transformers, family + kind).from_pretrained(folder, attn_implementation="eager").eval()
            logits = torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in IDS])
        (folder / "expected.json").write_text(json.dumps({"logits": logits.tolist()}))


def _sentences(folder: Path, start: Path, mode: str) -> None:
    from sentence_transformers import SentenceTransformer, models  # pyright: ignore[reportAttributeAccessIssue]

    parts: Any = [
        models.Transformer(str(start), max_seq_length=20),
        models.Pooling(32, pooling_mode=mode),
        models.Normalize(),
    ]
    model = SentenceTransformer(modules=parts, prompts={"query": "Query: ", "document": "Doc: "}, device="cpu")
    model.save(str(folder))
    expected = {role: model.encode(TEXTS, prompt_name=role).tolist() for role in ("query", "document")}
    (folder / "expected.json").write_text(json.dumps(expected))


def write(work: Path) -> None:
    """Write every folder that this process has the packages for, to `theirs/SOFTWARE VERSION, KIND`."""
    out, done = work / "theirs", {}

    def attempt(software: str, kind: str, fill: Callable[[Path], object]) -> None:
        try:
            name = f"{software} {importlib.import_module(software).__version__}, {kind}"
            if not (folder := out / name).exists():
                fill(folder)
                done[kind] = folder
        except ImportError:
            pass  # another process has it

    for kind, network in NETWORKS.items():
        attempt("transformers", kind, lambda folder, network=network: _network(*network, folder, work))
    if "BERT" in done:
        for mode in ("mean", "cls", "max"):
            attempt("sentence_transformers", mode, lambda folder, mode=mode: _sentences(folder, done["BERT"], mode))

        def cross(folder: Path) -> None:
            from sentence_transformers import CrossEncoder

            CrossEncoder(str(done["BERT classifier"]), device="cpu").save_pretrained(str(folder))

        attempt("sentence_transformers", "CrossEncoder", cross)

        def late(folder: Path) -> None:
            from pylate import models  # pyright: ignore[reportMissingImports]

            models.ColBERT(str(done["BERT"]), device="cpu", embedding_size=16).save(str(folder))

        attempt("pylate", "ColBERT", late)


def _embeddings(folder: Path) -> float | str:
    from biphasic.evaluation.embedder import EncoderEmbedder
    from biphasic.model.encoder import load_embedder

    embedder = EncoderEmbedder(load_embedder(str(folder)), "their/model", "")
    if embedder.sentence_settings.pooling is None:
        return "with `model.pooling`"
    expected = json.loads((folder / "expected.json").read_text())
    prompts = embedder.sentence_settings.prompts
    pairs = [(embedder.embed([prompts[role] + text for text in TEXTS], print), expected[role]) for role in expected]
    return max(float(np.abs(embeddings - np.array(right)).max()) for embeddings, right in pairs)


def _logits(folder: Path) -> float | str:
    from biphasic.model.backbone import load_language_model
    from biphasic.model.forward import packed_forward
    from biphasic.model.segments import Segments

    model = load_language_model(str(folder)).eval()
    if not (file := folder / "expected.json").is_file():
        return "the tied head"
    segments = Segments.of([len(ids) for ids in IDS], torch.device("cpu"))
    causal = "modernbert" not in model.config.model_type
    with torch.no_grad():
        logits = model.logits(packed_forward(model.backbone, torch.tensor([*IDS[0], *IDS[1]]), segments, causal=causal))
    return float((logits - torch.tensor(json.loads(file.read_text())["logits"])).abs().max())


def _command(*arguments: str) -> float:
    from biphasic.commands import main
    from biphasic.errors import UserError

    with contextlib.redirect_stderr(io.StringIO()) as message:
        status = main(list(arguments))
    if status:
        raise UserError(message.getvalue().strip().splitlines()[-1])
    return 0.0


def read(work: Path, out: Path) -> None:
    """Read every folder by each way, and write what became of it: equal, refused with its message, or WRONG."""
    from biphasic.errors import UserError

    results: dict[str, dict[str, str]] = {}
    text = work / "new.jsonl"
    text.write_text('{"text": "Rain"}\n')
    for folder in sorted((work / "theirs").iterdir()):
        with tempfile.TemporaryDirectory() as temporary:
            ways: dict[str, Callable[[], float | str]] = {
                "evaluate": lambda folder=folder: _embeddings(folder),
                "model.init_from": lambda folder=folder: _logits(folder),
                "predict": lambda folder=folder: _command("predict", str(folder), str(text)),
                "export": lambda folder=folder, to=temporary: _command("export", str(folder), f"{to}/out"),
            }
            for way, attempt in ways.items():
                try:
                    difference = attempt()
                    outcome = difference if isinstance(difference, str) else "equal" if difference <= 1e-3 else "WRONG"
                except UserError as error:
                    outcome = f"refused: {error}".replace(f"{folder}", "FOLDER")
                except Exception as error:
                    outcome = f"TRACEBACK: {type(error).__name__}: {error}"
                results.setdefault(folder.name, {})[way] = outcome
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    else:
        read(Path(sys.argv[2]), Path(sys.argv[3]))
