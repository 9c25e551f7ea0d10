"""Serve a converted embedder: MODEL=minilm-long uvicorn serve:app --app-dir examples

curl localhost:8000/embed -H "Content-Type: application/json" -d '{"texts": ["the cat sat on a mat"]}'
"""

import os
from typing import Annotated

import torch
from fastapi import Body, FastAPI
from transformers import AutoModel, AutoTokenizer

import linearize  # noqa: F401 - registers converted checkpoints with AutoModel

FOLDER = os.environ.get("MODEL", "minilm-long")
torch.set_num_threads(int(os.environ.get("THREADS", "2")))
tokenizer, model = AutoTokenizer.from_pretrained(FOLDER), AutoModel.from_pretrained(FOLDER).eval()
app = FastAPI()


@app.post("/embed")
def embed(texts: Annotated[list[str], Body(embed=True, min_length=1, max_length=64)]) -> list[list[float]]:
    """Return one normalised embedding per text; each text is truncated to the model's length."""
    return [embedding(text) for text in texts]


@torch.no_grad()
def embedding(text: str) -> list[float]:
    """Return the embedding of one text; texts are not batched, as padding would cost as much as text."""
    batch = tokenizer(text, truncation=True, return_tensors="pt")
    return torch.nn.functional.normalize(model(**batch).last_hidden_state[0].mean(dim=0), dim=0).tolist()
