"""Write an exported folder as an ONNX graph, `onnx/model.onnx`, for runtimes without PyTorch.

Packed attention can't be traced because it depends on the lengths in a batch. The traced network is transformers' own on a
padded batch: a mask excludes padding, and positions start at 0 at each text's first token.
"""

import importlib.util
import json
import random
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from biphasic.errors import UserError
from biphasic.export.folder import require_export
from biphasic.export.write import HEAD_FILE, write_atomically
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.heads import TextHead
from biphasic.model.pooling import Pooling
from biphasic.model.segments import Segments
from biphasic.storage import user_errors

FOLDER = "onnx"
GRAPH, WEIGHTS = "model.onnx", "model.onnx_data"
"""File names that sentence-transformers, Optimum and text-embeddings-inference expect in `onnx/`."""
TOLERANCE = 1e-3
"""Largest allowed difference between an output value of the graph and of the packed model."""
SINGLE_FILE_BYTES = 1_900_000_000
"""Largest size of weights stored in the graph's own file, in bytes, because a protobuf message is smaller than 2 GiB."""


class PaddedEncoder(nn.Module):
    """transformers' EuroBERT or ModernBERT on padded batches, with PyTorch's attention (`sdpa`) and mean pooling.

    `head` is a fine-tuned text classifier's, which reads the embedding.
    """

    def __init__(self, backbone: Any, head: nn.Module | None = None):
        super().__init__()
        backbone.set_attn_implementation("sdpa")
        self.backbone, self.head = backbone, head

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        """Return hidden states [batch, length, width], zero at padding, and embeddings [batch, width], in the model's dtype.

        With a head, also logits [batch, labels]. Both inputs are int64 [batch, length]. The mask is 0 at padding, on
        either side.
        """
        kept = attention_mask != 0
        positions = (kept.long().cumsum(1) - 1).clamp(min=0)
        dtype = self.backbone.dtype
        # The lowest finite number, because -inf would give NaN for a text without tokens.
        lowest = torch.finfo(dtype).min
        mask: Any = torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, lowest)[:, None, None, :]
        if self.backbone.config.model_type == "modernbert":
            distance = (positions[:, None, :, None] - positions[:, None, None, :]).abs()
            local = mask.masked_fill(distance > self.backbone.config.sliding_window, lowest)
            mask = {"full_attention": mask, "sliding_attention": local}
        output = self.backbone(input_ids=input_ids, attention_mask=mask, position_ids=positions)
        hidden = output.last_hidden_state * kept[..., None].to(dtype)
        # A text without tokens has an embedding of zeros.
        embedding = hidden.sum(1) / kept.sum(1, keepdim=True).clamp(min=1)
        return (hidden, embedding) if self.head is None else (hidden, embedding, self.head(embedding))


def export_onnx(folder: Path) -> Path:
    """Write `onnx/model.onnx` into an exported folder: a `PaddedEncoder` in fp32, with dynamic batch and length.

    The graph of a fine-tuned text classifier also has its logits; that of other heads has the encoder alone.

    The graph is run on single texts and on padded batches, and is written only if its results match the packed model's.
    Large weights are written to `model.onnx_data`. Earlier graphs are replaced. Returns the graph's path. Raises a
    UserError if packages are missing, the folder is not an export in EuroBERT's or ModernBERT's format, its pooling is
    not the mean, the graph's results differ from the model's, or the graph can't be written.
    """
    if missing := [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]:
        raise UserError(f"onnx: {' and '.join(missing)} not installed: uv pip install '.[onnx]'")
    require_export(folder)
    family = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if family not in ("eurobert", "modernbert"):
        raise UserError(f"{folder} holds a {family} model: only eurobert and modernbert formats can be written as ONNX")
    if unknown := sorted(path.name for path in (folder / FOLDER).glob("*") if path.name not in (GRAPH, WEIGHTS)):
        raise UserError(f"{folder / FOLDER} holds {unknown[0]}, which an export doesn't write: move it away first")
    encoder = load_encoder(str(folder))
    if encoder.pooling != Pooling():
        raise UserError(f"{folder}: its pooling was edited; ONNX has only an export's own, the mean over tokens")
    encoder.backbone.eval()
    # Random texts of different lengths, the same in every call.
    generator, ids = random.Random(0), range(encoder.tokenizer.vocab_size - 1)
    lengths = sorted({min(length, encoder.text_tokenizer.max_length) for length in (1, 2, 3, 5, 9, 17, 64, 512)})
    texts = [torch.tensor(generator.choices(ids, k=length)) for length in lengths]
    head = _text_head(folder)
    expected = [_packed(encoder, head, text) for text in texts]
    padded = PaddedEncoder(encoder.backbone, head).eval()
    difference = 0.0

    def fill(partial: Path) -> None:
        nonlocal difference
        _trace(padded, partial)
        difference = _difference(partial / GRAPH, texts, expected)
        # `not <=` instead of `>`, because `>` is false for NaN.
        if not difference <= TOLERANCE:
            problem = f"the ONNX graph's results differ from the model's by {difference:.1e}, more than {TOLERANCE:g}"
            raise UserError(f"{folder}: {problem}: nothing is written")

    write_atomically(folder / FOLDER, fill)
    graph = folder / FOLDER / GRAPH
    print(f"{graph}: largest difference from the model {difference:.1e}, over {len(texts)} texts")
    return graph


def _text_head(folder: Path) -> TextHead | None:
    """Return the head of a fine-tuned text classifier, or None for another head and none."""
    if not (file := folder / HEAD_FILE).is_file():
        return None
    with user_errors(f"{file}: can't be read"):
        weights = load_file(file)
    if "dense.weight" not in weights:
        return None
    labels, width = weights["classifier.weight"].shape
    head = TextHead(width, labels).eval()
    head.load_state_dict(weights)
    return head


@torch.inference_mode()
def _packed(encoder: Encoder, head: nn.Module | None, text: Tensor) -> tuple[Tensor, ...]:
    """Return the hidden states [tokens, width], embedding [width] and any logits of a text, by packed attention."""
    segments = Segments.of([len(text)], torch.device("cpu"))
    hidden = encoder.hidden(text, segments)
    embedding = encoder.pooling(hidden, segments)[0]
    return (hidden, embedding) if head is None else (hidden, embedding, head(embedding))


def _trace(model: PaddedEncoder, folder: Path) -> None:
    """Write the graph, with weights above `SINGLE_FILE_BYTES` in a separate file."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    tokens = torch.ones((3, 7), dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    axes = {0: "batch", 1: "length"}
    with warnings.catch_warnings(), torch.no_grad():
        # torch.onnx.export warns that both inputs have axes with the same names.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (tokens, mask),
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state", "sentence_embedding", *(["logits"] if model.head is not None else [])],
            dynamic_shapes=(axes, axes),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    # The exporter stores the source file and line of each operator.
    ClearMetadataAndDocStringPass()(program.model)
    # Their shapes stand in the weights. onnxruntime's quantization transposes some and refuses the older shape beside them.
    for weight in program.model.graph.initializers.values():
        weight.shape = weight.type = None
    large = sum(weight.nbytes for weight in model.parameters()) > SINGLE_FILE_BYTES
    onnx_ir.save(program.model, folder / GRAPH, external_data=WEIGHTS if large else None)


def _difference(graph: Path, texts: list[Tensor], expected: list[tuple[Tensor, ...]]) -> float:
    """Return the largest difference (or NaN) from the expected outputs, for single texts and padded batches."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    batches = [([text], [result], "right") for text, result in zip(texts, expected, strict=True)]
    batches += [(texts, expected, "right"), (texts, expected, "left")]
    differences = []
    for batch, results, side in batches:
        tokens = pad_sequence(batch, batch_first=True, padding_side=side)
        mask = pad_sequence([torch.ones_like(text) for text in batch], batch_first=True, padding_side=side)
        outputs = session.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
        hidden, *others = (torch.from_numpy(output) for output in outputs)
        expected_hidden, *of_texts = zip(*results, strict=True)
        differences.append((hidden[mask.bool()] - torch.cat(expected_hidden)).abs().max())
        for output, of_text in zip(others, of_texts, strict=True):
            differences.append((output - torch.stack(of_text)).abs().max())
    return float(torch.stack(differences).max())
