"""The server of `examples/serve.py`, on a tiny model."""

import pytest
import torch
from support.checkpoints import make_text
from support.documents import CHECKOUT
from support.scripts import script


def test_the_server_embeds_texts_and_refuses_bad_requests(tmp_path, monkeypatch):
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx", reason="fastapi's test client needs it")
    from fastapi.testclient import TestClient

    monkeypatch.setenv("MODEL", str(make_text(tmp_path / "model")))
    monkeypatch.setenv("THREADS", str(torch.get_num_threads()))
    served = script("serve", CHECKOUT / "examples")
    client = TestClient(served.app)
    first, second = client.post("/embed", json={"texts": ["the cat sat on a mat", "it ran far away"]}).json()
    assert len(first) == len(second) and first != second
    assert sum(number**2 for number in first) == pytest.approx(1, abs=1e-5)
    (alone,) = client.post("/embed", json={"texts": ["the cat sat on a mat"]}).json()
    assert alone == pytest.approx(first, abs=1e-6)
    # In batches by length, each text keeps its place and its embedding.
    monkeypatch.setattr(served, "BATCH_TOKENS", 12)
    sizes, embeddings = [], served.embeddings
    monkeypatch.setattr(served, "embeddings", lambda rows: (sizes.append(len(rows)), embeddings(rows))[1])
    texts = ["far", "the cat sat on a mat", "a mat", "it ran far away", "us"]
    found = client.post("/embed", json={"texts": texts}).json()
    assert sizes == [1, 2, 2]
    for text, vector in zip(texts, found, strict=True):
        assert client.post("/embed", json={"texts": [text]}).json()[0] == pytest.approx(vector, abs=1e-6)
    for broken in ({"texts": []}, {"texts": "one"}, {}, {"texts": ["a"] * 65}):
        assert client.post("/embed", json=broken).status_code == 422
