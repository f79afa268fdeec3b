"""Small random models as exported folders of every kind, with what they should give: `python reader_folders.py WORK`.

Each folder in WORK has `expected.json` beside it (`NAME.json`): the actions that a reader can take, their inputs, and the
outputs of Biphasic's own packed attention and tokenizer.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as Tokens
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import AutoConfig, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from biphasic.data.tokenizer import load_tokenizer
from biphasic.export.finetuned import export_finetuned
from biphasic.export.formats import choose_format
from biphasic.export.onnx import export_onnx
from biphasic.export.write import write_folder
from biphasic.model.backbone import load_language_model
from biphasic.model.encoder import Encoder, load_encoder
from biphasic.model.heads import TextHead, TokenHead
from biphasic.model.language_model import from_hf_config
from biphasic.model.pooling import mean_pool
from biphasic.model.segments import Segments

TEXTS = [
    "Copper bridges, 12 years old; it's quiet.",
    "Rain",
    "A river carries sand to the sea, and the sea carries it back: nobody has counted the grains since 1997." * 2,
]
PAIRS = [["Who built the bridge?", "Copper bridges, 12 years old."], ["Rain", "The sea is quiet."]]
PROMPTS = {"query": "Query: ", "document": "Document: "}
DIMENSION = 8
TEMPLATE = "{text} {text_pair}"
FULL, LOCAL = "full_attention", "sliding_attention"
BASES: dict[str, Any] = {
    FULL: {"rope_type": "default", "rope_theta": 90_000.0},
    LOCAL: {"rope_type": "default", "rope_theta": 20_000.0},
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
NETWORKS: dict[str, dict[str, Any]] = {
    "eurobert": {"family": "llama", "num_key_value_heads": 2, "rope_parameters": BASES[FULL]},
    "llama": {"family": "llama", "num_key_value_heads": 2, "rope_parameters": LLAMA3},
    "gemma3": {
        "family": "gemma3_text", "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 5, "rope_parameters": BASES,
        "layer_types": [LOCAL, FULL, LOCAL, FULL],
    },
    "modernbert": {"family": "modernbert", "local_attention": 8, "global_attn_every_n_layers": 2, "rope_parameters": BASES},
    "bert": {"family": "bert"},
}  # fmt: skip
"""Each network's configuration; EuroBERT's format is written for plain Llama-shaped networks."""


def write_tokenizer(folder: Path, around: bool) -> None:
    """Write a byte-level tokenizer, which puts [CLS] and [SEP] around a text with `around`."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = Tokens(models.BPE())
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokens.train_from_iterator(
        TEXTS * 9,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    names = {"pad_token": "[PAD]", "eos_token": "[SEP]", "mask_token": "[MASK]"}
    if around:
        names |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
        tokens.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokens, **names, model_max_length=512).save_pretrained(folder)


def draw(module: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)


def base(network: str, work: Path) -> Path:
    """Write a pretrained network with its language-model head, and return its folder."""
    sizes, out = {**SIZES, **NETWORKS[network]}, work / f"{network}-encoder"
    family = sizes.pop("family")
    write_tokenizer(work / f"{network}-tokenizer", family in ("bert", "modernbert"))
    if family == "bert":
        model = BertForMaskedLM(BertConfig(**sizes))
        draw(model)
        model.save_pretrained(out)
        shutil.copytree(work / f"{network}-tokenizer", out, dirs_exist_ok=True)
        return out
    tokenizer = load_tokenizer(str(work / f"{network}-tokenizer"))
    special = {"pad_token_id": 0, **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 3)}
    language_model = from_hf_config(AutoConfig.for_model(family, **sizes, **special), seed=1)
    draw(language_model)
    write_folder(
        choose_format(language_model.config, tokenizer),
        "ForMaskedLM",
        language_model.state_dict(),
        tokenizer,
        out,
        "card",
    )
    return out


@torch.no_grad()
def states(encoder: Encoder, texts: list[str]) -> tuple[list[list[int]], torch.Tensor, Segments]:
    ids = encoder.tokenize(texts)
    segments = Segments.of([len(text) for text in ids], torch.device("cpu"))
    return ids, encoder.hidden(torch.tensor([token for text in ids for token in text]), segments), segments


class Folders:
    """The folders and their actions: `{folder: {action: {"inputs": …, "expected": …}}}`."""

    def __init__(self, work: Path):
        self.work = work
        self.actions: dict[str, dict[str, Any]] = {}

    def add(self, folder: str, action: str, inputs: Any, expected: torch.Tensor) -> None:
        self.actions.setdefault(folder, {})[action] = {"inputs": inputs, "expected": expected.tolist()}

    def add_gguf(self, folder: str) -> None:
        """Expect in llama.cpp's file: bases, window, period, epsilon, mean pooling, special tokens, the sum of weights."""
        config = json.loads((self.work / folder / "config.json").read_text())
        rope, is_modern = config.get("rope_parameters") or {}, config["model_type"] == "modernbert"
        full, local = rope.get(FULL, rope).get("rope_theta", 0), rope.get(LOCAL, {}).get("rope_theta", 0)
        window = [config["local_attention"], config["global_attn_every_n_layers"]] if is_modern else [0, 0]
        epsilon = next(config[name] for name in ("layer_norm_eps", "rms_norm_eps") if name in config)
        added = float(config["model_type"] in ("bert", "modernbert"))
        weights = load_file(self.work / folder / "model.safetensors").values()
        total = sum(float(weight.double().abs().sum()) for weight in weights)
        self.add(folder, "gguf", None, torch.tensor([full, local, *window, epsilon, 1, added, added, total]).double())

    @torch.no_grad()
    def make(self, network: str) -> None:
        """Write all folders of a network."""
        folder = base(network, self.work)
        encoder = load_encoder(str(folder))
        encoder.backbone.eval()
        _, hidden, segments = states(encoder, TEXTS)
        if network != "bert":  # the start of BERT's exports is no export
            self.add(folder.name, "hidden", TEXTS, hidden)
            self.add(folder.name, "vocabulary", TEXTS, load_language_model(str(folder)).eval().logits(hidden))
            self.add(folder.name, "embed", TEXTS, mean_pool(hidden, segments))
        for kind, head, problem in (
            ("classifier", TextHead(32, 3), "single_label_classification"),
            ("multi-label", TextHead(32, 3), "multi_label_classification"),
            ("regression", TextHead(32, 1), "regression"),
            ("cross-encoder", TextHead(32, 1), "regression"),
            ("entities", TokenHead(32, 3), None),
            ("retrieval", nn.Identity(), None),
        ):
            self.finetuned(load_encoder(str(folder)), network, kind, head, problem)

    def finetuned(self, encoder: Encoder, network: str, kind: str, head: Any, problem: str | None) -> None:
        draw(head)
        encoder.backbone.eval()
        name = f"{network}-{kind}"
        labels = None if kind == "retrieval" else [f"label{number}" for number in range(head.classifier.out_features)]
        options: dict[str, Any] = {
            "prompts": PROMPTS if labels is None else {},
            "max_length": 512,
            "problem_type": problem,
        }
        options["refuse_pairs"] = kind == "cross-encoder"
        export_finetuned(encoder, head, labels, self.work / name, lambda **_: "card", **options)
        texts = [TEMPLATE.format(text=a, text_pair=b) for a, b in PAIRS] if kind == "cross-encoder" else TEXTS
        _, hidden, segments = states(encoder, texts)
        if kind == "retrieval":
            for role, prompt in PROMPTS.items():
                _, hidden, segments = states(encoder, [prompt + text for text in TEXTS])
                self.add(name, role, TEXTS, mean_pool(hidden, segments))
            self.add_gguf(name)
            self.add(name, "truncated", TEXTS, mean_pool(hidden, segments)[:, :DIMENSION])
        elif kind == "entities":
            self.add(name, "tokens", TEXTS, head(hidden))
        else:
            logits = head(mean_pool(hidden, segments))
            scores = {"classifier": logits.softmax(-1), "multi-label": logits.sigmoid()}.get(kind, logits)
            if kind != "cross-encoder":
                self.add(name, "logits", TEXTS, logits)
                self.add(name, "pipeline", TEXTS, scores)
            else:
                self.add(name, "pairs", PAIRS, logits)

    def graph(self, name: str, new: str) -> None:
        """Copy a folder, and add an ONNX graph to the copy; to another copy one in int8, by onnxruntime."""
        from onnxruntime.quantization import quantize_dynamic

        copy, small = self.work / new, self.work / f"{new}-int8"
        shutil.copytree(self.work / name, copy)
        export_onnx(copy)
        shutil.copytree(copy, small)
        graph = small / "onnx" / "model.onnx"
        quantize_dynamic(graph, graph.with_name("int8.onnx"))
        graph.with_name("int8.onnx").replace(graph)
        encoder = load_encoder(str(self.work / name))
        encoder.backbone.eval()
        _, hidden, segments = states(encoder, TEXTS)
        for folder in (copy, small):
            self.actions[folder.name] = {}
            if "logits" in self.actions[name]:
                self.actions[folder.name]["graph logits"] = self.actions[name]["logits"]
            else:
                self.add(folder.name, "graph embed", TEXTS, mean_pool(hidden, segments))


def main() -> None:
    work = Path(sys.argv[1])
    folders = Folders(work)
    for network in NETWORKS:
        folders.make(network)
    for network in ("eurobert", "modernbert"):
        folders.graph(f"{network}-retrieval", f"{network}-onnx")
        folders.graph(f"{network}-classifier", f"{network}-onnx-classifier")
    (work / "actions.json").write_text(json.dumps(folders.actions))


if __name__ == "__main__":
    main()
