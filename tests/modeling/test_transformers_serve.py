"""`transformers serve` runs a converted folder by the code saved in it, and refuses continuous batching."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from support.checkpoints import make_text, tokenizer
from transformers import AutoModelForCausalLM

# These tests are slow: the fast ones should not pay for the imports.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not all(map(find_spec, ("openai", "uvicorn", "httpx"))), reason="openai or uvicorn is missing"),
]

WITHOUT_LINEARIZE = """
import sys

class Refuses:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "linearize":
            raise ImportError("linearize is not installed here")

sys.meta_path.insert(0, Refuses())
from transformers.cli.transformers import app
app()
"""
PATIENCE = 600
"""Seconds that a server may take to start on a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("served") / "llama", name="llama", head="AutoModelForCausalLM")


def completion(folder, tmp_path, monkeypatch, *more):
    """Start a server, ask it for eight tokens, and end it; return the answer and the server's log."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    words = ["serve", folder, "--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1", "--port", port, *more]
    with open(tmp_path / "log", "w") as log:
        command = [sys.executable, "-c", WITHOUT_LINEARIZE, *map(str, words)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            for _ in range(PATIENCE):
                assert server.poll() is None, (tmp_path / "log").read_text()[-2000:]
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.HTTPError:
                    time.sleep(1)
            asked = {"model": str(folder), "prompt": "the cat sat on", "max_tokens": 8, "temperature": 0}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=asked, timeout=PATIENCE)
        finally:
            # An error is logged after its answer.
            server.terminate()
            server.wait(PATIENCE)
    return answer, (tmp_path / "log").read_text()


def test_it_completes_as_generate_does(folder, tmp_path, monkeypatch):
    answer, log = completion(folder, tmp_path, monkeypatch)
    assert answer.status_code == 200, log[-2000:]
    words = tokenizer()
    asked = words("the cat sat on", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = model.generate(**asked, max_new_tokens=8, do_sample=False)[0, asked["input_ids"].shape[1] :]
    assert answer.json()["choices"][0]["text"] == words.decode(found, skip_special_tokens=True)
    assert answer.json()["usage"]["completion_tokens"] == len(found)


def test_continuous_batching_is_refused_in_one_line(folder, tmp_path, monkeypatch):
    answer, log = completion(folder, tmp_path, monkeypatch, "--continuous-batching")
    assert answer.status_code == 500
    assert (
        "ConfigError: got a call for continuous batching (generate_batch), which keeps keys and values in pages" in log
    )
