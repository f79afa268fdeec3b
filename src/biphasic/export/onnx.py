"""An exported folder as an ONNX graph, for runtimes without PyTorch: `onnx/model.onnx`, checked against our embeddings.

Packed attention takes padding out and attends to segments, which depends on the values of a batch and can't be traced. The
traced network is transformers' own, on a padded batch: a mask keeps padding out of attention, and positions count from each
text's first token.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from biphasic.config.errors import UserError
from biphasic.export.folder import require_export
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.pooling import Pooling
from biphasic.model.segments import Segments
from biphasic.storage import short

FOLDER = "onnx"
GRAPH, WEIGHTS = "model.onnx", "model.onnx_data"
"""The names that sentence-transformers, Optimum and text-embeddings-inference look for in `onnx/`."""
TOLERANCE = 1e-3
"""The largest difference from our embeddings, in any number, that a graph may have."""
_IN_ONE_FILE = 1_900_000_000
"""Bytes of weights up to which they lie in the graph's own file: a protobuf message has less than 2 GiB."""
_LENGTHS = (1, 2, 3, 5, 9, 17, 64)
_CHECKED = 512
"""Tokens of the longest text that is checked."""


class PaddedEncoder(nn.Module):
    """A EuroBERT backbone on padded batches, and the folder's pooling.

    Args:
        backbone: transformers' `EuroBertModel`; its attention is set to PyTorch's own.
        pooling: of hidden states to embeddings.
    """

    def __init__(self, backbone: Any, pooling: Pooling):
        super().__init__()
        backbone.set_attn_implementation("sdpa")
        self.backbone = backbone
        self.pooling = pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [batch, length, width], zeros at padding, and embeddings [batch, width], in the weights' dtype.

        Args:
            input_ids: int64 [batch, length]; what stands at padding doesn't matter.
            attention_mask: int64 [batch, length], 0 at padding, on either side.
        """
        kept = attention_mask != 0
        positions = (kept.long().cumsum(1) - 1).clamp(min=0)
        dtype = self.backbone.dtype
        # The lowest number and not -inf: a text without a token would give NaN.
        closed = torch.zeros(kept.shape, dtype=dtype).masked_fill(~kept, torch.finfo(dtype).min)
        output = self.backbone(input_ids=input_ids, attention_mask=closed[:, None, None, :], position_ids=positions)
        hidden = output.last_hidden_state * kept[..., None].to(dtype)
        pooled = self._pooled(hidden, kept, positions)
        return hidden, F.normalize(pooled, dim=-1) if self.pooling.normalize else pooled

    def _pooled(self, hidden: Tensor, kept: Tensor, positions: Tensor) -> Tensor:
        """[batch, width]; zeros for a text without a token."""
        count = kept.sum(1, keepdim=True)
        if self.pooling.mode == "mean":
            return hidden.sum(1) / count.clamp(min=1)
        if self.pooling.mode == "max":
            lowest = hidden.masked_fill(~kept[..., None], torch.finfo(hidden.dtype).min)
            return lowest.amax(1) * (count > 0)
        at = 0 if self.pooling.mode == "cls" else count - 1
        return (hidden * (kept & (positions == at))[..., None]).sum(1)


def require_onnx() -> None:
    """Say now, and not after loading a model, that packages are missing.

    Raises:
        UserError: onnx, onnxruntime or onnxscript isn't installed.
    """
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f"--onnx: {' and '.join(missing)} not installed: uv pip install '.[onnx]'")


def export_onnx(folder: Path, *, external: bool | None = None) -> Path:
    """Write `onnx/model.onnx` into an exported folder: the embedding model in fp32, without heads.

    Inputs `input_ids` and `attention_mask`, int64 [batch, length]; outputs `last_hidden_state`, float32
    [batch, length, width], zeros at padding, and `sentence_embedding`, float32 [batch, width]. Both axes are
    free. The graph is run once, on texts padded together and alone, and appears only if it gives our embeddings; an earlier
    one is replaced.

    Args:
        folder: an export in EuroBERT's format.
        external: whether the weights lie beside the graph, in `model.onnx_data`; default: where they are too large for one
            file.

    Returns:
        The graph's file.

    Raises:
        UserError: packages are missing, the folder is no such export, its pooling is another, the graph gives other numbers
            than the model, or it can't be written.
    """
    require_onnx()
    require_eurobert(folder)
    strange = sorted(path.name for path in (folder / FOLDER).glob("*") if path.name not in (GRAPH, WEIGHTS))
    if strange:
        raise UserError(f"{folder / FOLDER} holds {strange[0]}, which was not written here: move it away first")
    encoder = load_encoder(str(folder))
    encoder.backbone.eval()
    texts = _texts(encoder)
    expected = [_ours(encoder, text) for text in texts]
    padded = PaddedEncoder(encoder.backbone, encoder.pooling).eval()
    if external is None:
        external = sum(p.numel() * p.element_size() for p in padded.parameters()) > _IN_ONE_FILE
    partial, earlier = folder / f".{FOLDER}.partial", folder / f".{FOLDER}.earlier"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _trace(padded, partial, external)
        difference = _difference(partial / GRAPH, texts, expected)
        # NaN is no number below the tolerance either.
        if not difference <= TOLERANCE:
            raise UserError(
                f"{folder}: the ONNX graph's numbers are up to {difference:.1e} from the model's, more than {TOLERANCE:g}: "
                "nothing is written"
            )
        shutil.rmtree(earlier, ignore_errors=True)
        if (folder / FOLDER).exists():
            (folder / FOLDER).rename(earlier)
        partial.rename(folder / FOLDER)
    except OSError as error:
        raise UserError(f"{folder / FOLDER} can't be written: {short(error)}") from None
    finally:
        for left in (partial, earlier):
            shutil.rmtree(left, ignore_errors=True)
    print(f"{folder / FOLDER / GRAPH}: largest difference from the model {difference:.1e}, over {len(texts)} texts")
    return folder / FOLDER / GRAPH


def require_eurobert(folder: Path) -> None:
    """Raise a UserError where the folder isn't an export, or is one of another format than EuroBERT's."""
    require_export(folder)
    family = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if family != "eurobert":
        raise UserError(f"{folder} holds a {family} model: only the eurobert format can be written as ONNX")


def _texts(encoder: Encoder) -> list[list[int]]:
    """Token ids of texts of different lengths, the same for every call."""
    longest = min(encoder.reader.longest, _CHECKED)
    lengths = [*(length for length in _LENGTHS if length < longest), longest]
    draw = random.Random(0)
    return [[draw.randrange(encoder.tokenizer.vocab_size - 1) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def _ours(encoder: Encoder, text: list[int]) -> tuple[Tensor, Tensor]:
    """Hidden states [tokens, width] and the embedding [width] of a text, through the packed backbone."""
    segments = Segments.of([len(text)], torch.device("cpu"))
    hidden = encoder.hidden(torch.tensor(text), segments)
    return hidden, encoder.pooling(hidden, segments)[0]


def _trace(model: PaddedEncoder, folder: Path, external: bool) -> None:
    """Write the graph, with weights in it or in one file beside it."""
    import onnx_ir
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    tokens = torch.ones((3, 7), dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    both = {0: "batch", 1: "length"}
    with warnings.catch_warnings(), torch.no_grad():
        # It warns that both inputs have axes of the same names.
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            model,
            (tokens, mask),
            input_names=["input_ids", "attention_mask"],
            output_names=["last_hidden_state", "sentence_embedding"],
            dynamic_shapes=(both, both),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    # The exporter notes with each operator which line of which file made it.
    ClearMetadataAndDocStringPass()(program.model)
    onnx_ir.save(program.model, folder / GRAPH, external_data=WEIGHTS if external else None)


def _difference(graph: Path, texts: list[list[int]], expected: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference of the graph's numbers from ours: texts alone, and together with padding on either side."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    longest = max(map(len, texts))
    batches = [([text], [0], [index]) for index, text in enumerate(texts)]
    everything = list(range(len(texts)))
    batches += [(texts, [0] * len(texts), everything), (texts, [longest - len(text) for text in texts], everything)]
    largest = 0.0
    for rows, starts, which in batches:
        tokens = torch.zeros((len(rows), max(map(len, rows))), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, (text, start) in enumerate(zip(rows, starts, strict=True)):
            tokens[row, start : start + len(text)] = torch.tensor(text)
            mask[row, start : start + len(text)] = 1
        found = session.run(None, {"input_ids": tokens.numpy(), "attention_mask": mask.numpy()})
        hidden, embeddings = (torch.from_numpy(value) for value in found)
        for row, index in enumerate(which):
            ours, embedding = expected[index]
            differences = (
                (hidden[row][mask[row].bool()] - ours).abs().max(),
                (embeddings[row] - embedding).abs().max(),
            )
            # max() of Python forgets a NaN.
            largest = float(torch.stack([torch.tensor(largest), *differences]).max())
    return largest
