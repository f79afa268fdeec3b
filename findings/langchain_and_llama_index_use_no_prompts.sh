#!/usr/bin/env bash
# langchain-huggingface 1.2.3, llama-index-embeddings-huggingface 0.8.0: prompts in a sentence-transformers folder aren't used.
#
# Expected: a retrieval model whose folder names prompts for queries and documents embeds a query as sentence-transformers' encode_query
# does, and a document as encode_document does. txtai 9.14.0 does it.
# Seen: both call sentence-transformers' encode for queries and documents alike, which adds no prompt. A query and a document of the
# same text get one embedding, and a model that was trained with prompts ranks by embeddings that it never learned. Nothing warns. With
# prompt names (LangChain) or the prompts' texts (LlamaIndex) as arguments they are right.
#
# Checked on 2026-11-30, Python 3.11, Linux x86-64, without a GPU.
# Exit status: 0 as described here, 1 if the library behaves differently, another one if it can't be installed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" # away from a pyproject.toml whose overrides uv would read
packages=(langchain-huggingface==1.2.3 llama-index-embeddings-huggingface==0.8.0 txtai==9.14.0 sentence-transformers==6.2.0 transformers==5.23.0 torch==2.11.0 numpy==2.3.5)
if command -v uv >/dev/null; then
    uv venv --quiet --python "$(command -v python3)" "$work/venv"
    uv pip install --quiet --python "$work/venv/bin/python" "${packages[@]}"
else
    python3 -m venv "$work/venv"
    "$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "${packages[@]}"
fi
cat >"$work/prompts.py" <<'PYTHON'
import sys
import tempfile
from importlib.metadata import version

import numpy as np
from langchain_huggingface import HuggingFaceEmbeddings
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from txtai import Embeddings

TEXT = "w1 w2 w3"
words = ["[PAD]", "[UNK]", ":", "search", "passage", "w1", "w2", "w3"]


def make_model(folder):
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(f"{folder}/encoder")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    wrapped.save_pretrained(f"{folder}/encoder")
    model = SentenceTransformer(f"{folder}/encoder", device="cpu")
    model.prompts = {"query": "search: ", "document": "passage: "}
    model.save_pretrained(f"{folder}/model")
    return SentenceTransformer(f"{folder}/model", device="cpu")


def langchain(path, **options):
    model = HuggingFaceEmbeddings(model_name=path, model_kwargs={"device": "cpu"}, **options)
    return model.embed_query(TEXT), model.embed_documents([TEXT])[0]


def llama_index(path, **options):
    model = HuggingFaceEmbedding(model_name=path, device="cpu", **options)
    return model.get_query_embedding(TEXT), model.get_text_embedding(TEXT)


def txtai(path):
    model = Embeddings(path=path, gpu=False)
    return model.transform(TEXT, "query"), model.transform(TEXT, "data")


with tempfile.TemporaryDirectory() as folder:
    model, path = make_model(folder), f"{folder}/model"
    right = {
        "the query's": model.encode_query(TEXT),
        "the document's": model.encode_document(TEXT),
        "that without a prompt": model.encode(TEXT),
    }
    embeddings = {
        "langchain-huggingface": langchain(path),
        "langchain-huggingface with prompt names": langchain(
            path, query_encode_kwargs={"prompt_name": "query"}, encode_kwargs={"prompt_name": "document"}
        ),
        "llama-index": llama_index(path),
        "llama-index with the prompts' texts": llama_index(
            path, query_instruction="search: ", text_instruction="passage: "
        ),
        "txtai": txtai(path),
    }


def described(embedding):
    """Which of sentence-transformers' embeddings has this direction."""
    cosines = {
        name: np.dot(embedding, other) / np.linalg.norm(embedding) / np.linalg.norm(other)
        for name, other in right.items()
    }
    [name] = [name for name, cosine in cosines.items() if cosine > 1 - 1e-5]
    return name


for package in ("langchain-huggingface", "llama-index-embeddings-huggingface", "txtai", "sentence-transformers"):
    print(package, version(package))
print("expected: of the same text as a query and as a document, the query's embedding and the document's")
seen = {name: [described(embedding) for embedding in pair] for name, pair in embeddings.items()}
for name, (query, document) in seen.items():
    print(f"seen: {name}: {query}, {document}")
plain, prompted = ["that without a prompt"] * 2, ["the query's", "the document's"]
wrong = [seen["langchain-huggingface"], seen["llama-index"]]
others = [pair for pair in seen.values() if pair not in wrong]
sys.exit(not (all(pair == plain for pair in wrong) and others == [prompted] * 3))
PYTHON
HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 "$work/venv/bin/python" "$work/prompts.py" 2>"$work/errors" || {
    status=$?
    tail -n 5 "$work/errors" >&2
    exit $status
}
