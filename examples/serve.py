"""Serve a converted embedder: MODEL=minilm-long uvicorn serve:app --app-dir examples

curl localhost:8000/embed -H "Content-Type: application/json" -d '{"texts": ["the cat sat on a mat"]}'
"""

import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from fastapi import Body, FastAPI
from transformers import AutoModel, AutoTokenizer

import linearize  # noqa: F401 - registers converted checkpoints with AutoModel

FOLDER = os.environ.get("MODEL", "minilm-long")
BATCH_TOKENS = 4096
torch.set_num_threads(int(os.environ.get("THREADS", "2")))
tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModel.from_pretrained(FOLDER).eval()
app = FastAPI()


@app.post("/embed")
def embed(texts: Annotated[list[str], Body(embed=True, min_length=1, max_length=64)]) -> list[list[float]]:
    """Return one normalised embedding per text; each text is truncated to the model's length."""
    rows = [tokenizer(text, truncation=True) for text in texts]
    vectors: dict[int, list[float]] = {}
    # Texts of similar length run together, as padding costs as much as text.
    left = sorted(range(len(rows)), key=lambda row: len(rows[row]["input_ids"]), reverse=True)
    while left:
        count = max(1, BATCH_TOKENS // len(rows[left[0]]["input_ids"]))
        batch, left = left[:count], left[count:]
        vectors |= zip(batch, embeddings([rows[row] for row in batch]), strict=True)
    return [vectors[row] for row in range(len(rows))]


@torch.no_grad()
def embeddings(rows: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Return the mean over the tokens of each tokenized text, normalised."""
    batch = tokenizer.pad(list(rows), return_tensors="pt")
    mask = batch["attention_mask"][..., None]
    means = (model(**batch).last_hidden_state * mask).sum(dim=1) / mask.sum(dim=1)
    found: list[list[float]] = torch.nn.functional.normalize(means, dim=1).tolist()
    return found
