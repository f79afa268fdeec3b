"""Load folders with the libraries of this process alone, and write their outputs: `python reader_load.py WORK OUT LIBRARY`.

WORK has the folders and `actions.json` (reader_folders.py). For each folder and action, OUT has `outputs` (nested lists) and
what was logged meanwhile, or an `error`. Nothing of Biphasic is imported.
"""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np


def _batch(folder: str, texts: Any, pairs: Any = None) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer(texts, pairs, padding=True, return_tensors="pt")


def _network(auto: str, texts: list[str], folder: str, pairs: list[str] | None = None) -> Any:
    import torch
    import transformers

    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    batch = _batch(folder, texts, pairs)
    with torch.no_grad():
        output = model(**batch)[0]
    per_text = auto.endswith("SequenceClassification")
    return (output if per_text else output[batch["attention_mask"].bool()]).float().numpy()


def _pipeline(folder: str, texts: list[str]) -> Any:
    from transformers import pipeline

    classify: Any = pipeline("text-classification", folder, trust_remote_code=True, top_k=None)
    rows = [{row["label"]: row["score"] for row in rows} for rows in classify(texts)]
    return np.array([[row[label] for label in sorted(row)] for row in rows])


def _sentences(folder: str, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(folder, device="cpu", trust_remote_code=True, **options)


def _cross(folder: str, pairs: Any) -> Any:
    import torch
    from sentence_transformers import CrossEncoder

    model: Any = CrossEncoder(folder, device="cpu", trust_remote_code=True)
    return model.predict([tuple(pair) for pair in pairs], activation_fn=torch.nn.Identity())


def _optimum(name: str, folder: str, texts: list[str]) -> Any:
    import optimum.onnxruntime  # pyright: ignore[reportMissingImports]

    model = getattr(optimum.onnxruntime, name).from_pretrained(folder, subfolder="onnx", file_name="model.onnx")
    batch = _batch(folder, texts)
    output = model(**batch)
    if name.endswith("Classification"):
        return output.logits.numpy()
    mask = batch["attention_mask"][..., None]
    return ((output.last_hidden_state * mask).sum(1) / mask.sum(1)).numpy()


def _graph(output: str, folder: str, texts: list[str]) -> Any:
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    tokenizer.enable_padding()
    encodings = tokenizer.encode_batch(texts)
    inputs = {
        "input_ids": np.array([each.ids for each in encodings]),
        "attention_mask": np.array([each.attention_mask for each in encodings]),
    }
    return onnxruntime.InferenceSession(f"{folder}/onnx/model.onnx").run([output], inputs)[0]


def _fastembed(folder: str, texts: list[str]) -> Any:
    from fastembed import TextEmbedding  # pyright: ignore[reportMissingImports]
    from fastembed.common.model_description import ModelSource, PoolingType  # pyright: ignore[reportMissingImports]

    TextEmbedding.add_custom_model(
        model=folder, pooling=PoolingType.MEAN, normalization=False, sources=ModelSource(hf=folder), dim=32,
        model_file="onnx/model.onnx",
    )  # fmt: skip
    return np.array(list(TextEmbedding(folder, specific_model_path=folder).embed(texts)))


def _pylate(folder: str, texts: list[str]) -> Any:
    import torch
    from pylate import models  # pyright: ignore[reportMissingImports]

    model: Any = models.ColBERT(folder, device="cpu", trust_remote_code=True)
    batch = _batch(folder, texts)
    with torch.no_grad():
        return model[0](dict(batch))["token_embeddings"][batch["attention_mask"].bool()].numpy()


def _gguf(folder: str, _: Any) -> Any:
    """Convert a folder, and return what the file says (`Folders.add_gguf`). The tokenizer passes as GPT-2's."""
    root = os.environ["LLAMA_CPP"]
    code = (
        f"import runpy, sys; sys.path[:0] = ['{root}', '{root}/gguf-py']; from conversion import base; "
        "base.TextModel.get_vocab_base_pre = lambda *_: 'gpt-2'; sys.argv = ['convert', *sys.argv[1:]]; "
        f"runpy.run_path('{root}/convert_hf_to_gguf.py', run_name='__main__')"
    )
    file = f"{folder}.gguf"
    command = [sys.executable, "-c", code, folder, "--outtype", "f32", "--outfile", file]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    sys.path.insert(0, f"{root}/gguf-py")
    import gguf  # pyright: ignore[reportMissingImports]

    reader: Any = gguf.GGUFReader(file)
    values = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    names = ("rope.freq_base", "rope.freq_base_swa", "attention.sliding_window", "attention.sliding_window_pattern")
    norm = "attention.layer_norm_rms_epsilon" if "attention.key_length" in values else "attention.layer_norm_epsilon"
    weights = sum(float(np.abs(tensor.data).sum(dtype=np.float64)) for tensor in reader.tensors)
    added = [float(values.get(f"ggml.add_{name}_token", False)) for name in ("bos", "eos")]
    return [
        *(float(values.get(name, 0)) for name in names),
        values.get(norm, 0),
        values["pooling_type"],
        *added,
        weights,
    ]


def _of_pairs(folder: str, pairs: Any) -> Any:
    return _network("AutoModelForSequenceClassification", [a for a, _ in pairs], folder, [b for _, b in pairs])


ACTIONS: dict[str, dict[str, Callable[[str, Any], Any]]] = {
    "transformers": {
        "hidden": lambda folder, texts: _network("AutoModel", texts, folder),
        "vocabulary": lambda folder, texts: _network("AutoModelForMaskedLM", texts, folder),
        "logits": lambda folder, texts: _network("AutoModelForSequenceClassification", texts, folder),
        "pipeline": _pipeline,
        "tokens": lambda folder, texts: _network("AutoModelForTokenClassification", texts, folder),
        "pairs": _of_pairs,
    },
    "sentence-transformers": {
        "embed": lambda folder, texts: _sentences(folder).encode(texts),
        "query": lambda folder, texts: _sentences(folder).encode_query(texts),
        "document": lambda folder, texts: _sentences(folder).encode_document(texts),
        "truncated": lambda folder, texts: _sentences(folder, truncate_dim=8).encode_document(texts),
        "pairs": _cross,
        "graph embed": lambda folder, texts: _sentences(folder, backend="onnx").encode(texts),
    },
    "optimum-onnx": {
        "graph embed": lambda folder, texts: _optimum("ORTModelForFeatureExtraction", folder, texts),
        "graph logits": lambda folder, texts: _optimum("ORTModelForSequenceClassification", folder, texts),
    },
    "onnxruntime": {
        "graph embed": lambda folder, texts: _graph("sentence_embedding", folder, texts),
        "graph logits": lambda folder, texts: _graph("logits", folder, texts),
    },
    "fastembed": {"graph embed": _fastembed},
    "PyLate": {"hidden": _pylate},
    "llama.cpp": {"gguf": _gguf},
}  # fmt: skip
"""What each library does with a folder and inputs, by its name and the action's."""


@contextlib.contextmanager
def _heard() -> Iterator[io.StringIO]:
    """Collect everything that is printed, logged or warned about."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    loggers = [logging.getLogger(name) for name in (None, "transformers", "sentence_transformers", "optimum")]
    for logger in loggers:
        logger.addHandler(handler)
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), warnings.catch_warnings():
        warnings.simplefilter("default")
        yield text
    for logger in loggers:
        logger.removeHandler(handler)


def main() -> None:
    work, out, library = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    results: dict[str, Any] = {}
    for folder, actions in json.loads((work / "actions.json").read_text()).items():
        for action in ACTIONS[library].keys() & actions.keys():
            with _heard() as heard:
                try:
                    outputs = ACTIONS[library][action](str(work / folder), actions[action]["inputs"])
                    result: dict[str, Any] = {"outputs": np.asarray(outputs).tolist()}
                except Exception as error:
                    result = {"error": f"{type(error).__name__}: {error}"}
            results.setdefault(folder, {})[action] = {**result, "heard": heard.getvalue()}
    out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
