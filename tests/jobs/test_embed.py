"""`embed`: vectors of documents and spans against a plain forward and SentenceTransformer; files, resume, bad input."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from support.checkpoints import EMBEDDER, WORDS, make_embedder, make_original, make_text, tokenizer
from support.command_lines import run

import linearize
from linearize.core.errors import LinearizeError
from linearize.data.vectors import row_type
from linearize.jobs import embedder

sentence_transformers = pytest.importorskip("sentence_transformers")
SPAN = 7


def documents(count=9):
    """Texts of 1 to 66 words; the longest is cut. Some have white space around them."""
    lengths = [12, 40, 1, 66, 25, 7, 58, 3, 33][:count]
    texts = [" ".join(WORDS[(at + word) % len(WORDS)] for word in range(n)) for at, n in enumerate(lengths)]
    return [f"  {text}\n" if at % 3 == 1 else text for at, text in enumerate(texts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_embedder(tmp_path_factory.mktemp("embed") / "linear")


@pytest.fixture(scope="module")
def opened(folder):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def test_a_span_is_the_mean_of_its_states_and_a_document_is_what_encode_returns(folder, opened):
    texts = documents()
    found = linearize.embed(opened, texts, spans=SPAN)
    np.testing.assert_allclose(found.documents["vector"], opened.encode(texts), atol=2e-6)
    assert found.documents["document"].tolist() == list(range(len(texts)))
    model, words = opened[0].auto_model, tokenizer(length=60)
    for number, text in enumerate(texts):
        batch = words(text, truncation=True, max_length=60, return_tensors="pt")
        with torch.no_grad():
            states = model(**batch).last_hidden_state[0].numpy()
        # Without <s> and </s>.
        pieces = [states[1:-1][begin : begin + SPAN] for begin in range(0, len(states) - 2, SPAN)]
        spans = found.spans[found.spans["document"] == number]
        assert spans["span"].tolist() == list(range(len(pieces)))
        assert spans["tokens"].tolist() == [len(piece) for piece in pieces]
        np.testing.assert_allclose(spans["vector"], unit(np.stack([one.mean(axis=0) for one in pieces])), atol=2e-6)
        # The characters of the spans are their words, in order.
        read = text.split()[:58]
        cut = [read[begin : begin + SPAN] for begin in range(0, len(read), SPAN)]
        assert [text[one["start"] : one["end"]].split() for one in spans] == cut
        whole = found.documents[number]
        assert whole["tokens"] == len(states) and text[: whole["end"]].split() == read


@pytest.mark.parametrize("batch_tokens", [1, 97, 200])
def test_the_batch_size_changes_only_the_rounding(opened, batch_tokens):
    expected = linearize.embed(opened, documents(), spans=SPAN)
    found = linearize.embed(opened, documents(), spans=SPAN, batch_tokens=batch_tokens)
    for name in ("document", "span", "start", "end", "tokens"):
        np.testing.assert_array_equal(found.rows[name], expected.rows[name])
    np.testing.assert_allclose(found.rows["vector"], expected.rows["vector"], atol=2e-6)


def test_batches_hold_at_most_their_tokens():
    class Sized(list):
        pass

    rows = [Sized([0] * n) for n in (50, 30, 30, 10, 10, 10, 3)]
    made = list(embedder.batches(rows, 60))
    assert [[len(row) for row in batch] for batch in made] == [[50], [30, 30], [10, 10, 10, 3]]
    assert [len(batch) for batch in embedder.batches(rows, 1)] == [1] * 7


@pytest.mark.parametrize("include", [True, False])
def test_prompts_are_those_of_encode_and_belong_to_no_span(tmp_path, include):
    prompts = {"passage": "the cat ", "query": "who saw on "}
    folder = make_embedder(tmp_path / "linear", prompts=prompts, include=include, normalize=False)
    opened = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    texts = documents(5)
    for name in (None, "query"):
        found = linearize.embed(opened, texts, spans=SPAN, prompt=name)
        np.testing.assert_allclose(found.documents["vector"], opened.encode(texts, prompt_name=name), atol=2e-6)
        prompt = prompts[name or "passage"]
        batch = tokenizer(length=60)(prompt + texts[0], return_tensors="pt")
        with torch.no_grad():
            states = opened[0].auto_model(**batch).last_hidden_state[0].numpy()
        first = found.spans[0]
        begin = 1 + len(prompt.split())
        np.testing.assert_allclose(first["vector"], states[begin : begin + SPAN].mean(axis=0), atol=2e-6)
        assert texts[0][first["start"] : first["end"]].split() == texts[0].split()[:SPAN]
    with pytest.raises(LinearizeError, match=r"unknown prompt 'pasage'\. Did you mean 'passage'"):
        linearize.embed(opened, texts, prompt="pasage")


def test_a_tokenizer_that_pads_on_the_left(opened, monkeypatch):
    expected = linearize.embed(opened, documents(), spans=SPAN)
    monkeypatch.setattr(opened.tokenizer, "padding_side", "left")
    # Learned positions differ in padded rows; alone no row is padded, but spans are still found by the mask.
    found = linearize.embed(opened, documents(), spans=SPAN, batch_tokens=1)
    np.testing.assert_allclose(found.rows["vector"], expected.rows["vector"], atol=2e-6)


def test_a_dense_module_is_applied_to_documents_and_spans(tmp_path):
    folder = make_embedder(tmp_path / "linear")
    opened = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    width = opened[0].auto_model.config.hidden_size
    opened.insert(1 + 1, sentence_transformers.models.Dense(width, 5))
    opened.save(str(tmp_path / "dense"))
    for file in folder.glob("*linearize*"):
        shutil.copy(file, tmp_path / "dense" / file.name)
    again = sentence_transformers.SentenceTransformer(str(tmp_path / "dense"), device="cpu")
    found = linearize.embed(str(tmp_path / "dense"), documents(4), spans=SPAN, device="cpu")
    np.testing.assert_allclose(found.documents["vector"], again.encode(documents(4)), atol=2e-6)
    assert found.spans["vector"].shape[1] == 5
    np.testing.assert_allclose(np.linalg.norm(found.spans["vector"], axis=1), 1.0, atol=1e-6)


@pytest.fixture
def place(tmp_path, folder, monkeypatch):
    """A folder with the documents; row 2 is blank, which is no document."""
    monkeypatch.chdir(tmp_path)
    texts = documents()
    rows = [*texts[:2], " ", *texts[2:]]
    (tmp_path / "docs.jsonl").write_text(
        "".join(json.dumps({"text": text, "id": at}) + "\n" for at, text in enumerate(rows))
    )
    return tmp_path


def line(folder, output, *more):
    return ["embed", folder, "--dataset", "docs.jsonl", "--spans", SPAN, "--output", output, "--device", "cpu", *more]


def read_parquet(path):
    from pyarrow import parquet

    table = parquet.read_table(path)
    vectors = np.stack(table["vector"].to_numpy(zero_copy_only=False))
    rows = np.empty(len(vectors), row_type(vectors.shape[1]))
    for name in rows.dtype.names:
        rows[name] = vectors if name == "vector" else table[name].to_numpy()
    return rows


def test_both_files_hold_what_python_returns(place, folder, opened, capsys):
    expected = linearize.embed(opened, "docs.jsonl", spans=SPAN)
    assert expected.documents["document"].tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9]
    code, out, err = run(capsys, *line(folder, "vectors.parquet"))
    assert code == 0, err
    assert "9 documents and" in out and "Longer than the model reads, and cut: 1 of 9 documents." in out
    # Under a name in capital letters were the bytes of the other kind.
    assert (
        run(capsys, *line(folder, "vectors.NPY"))[0] == 0 == run(capsys, *line(folder, "vectors.NPY", "--overwrite"))[0]
    )
    for found in (read_parquet("vectors.parquet"), np.load("vectors.NPY", allow_pickle=False)):
        assert found.dtype == expected.rows.dtype
        for name in found.dtype.names:
            np.testing.assert_array_equal(found[name], expected.rows[name])
    assert sorted(path.name for path in place.iterdir()) == ["docs.jsonl", "vectors.NPY", "vectors.parquet"]


def test_an_interrupted_run_continues_to_the_bit(place, folder, monkeypatch, capsys):
    monkeypatch.setattr(embedder, "PART_TOKENS", 60)
    assert run(capsys, *line(folder, "whole.npy"))[0] == 0
    batch, calls = embedder.Embedder._batch, []

    def stopped(self, rows):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return batch(self, rows)

    monkeypatch.setattr(embedder.Embedder, "_batch", stopped)
    code, _, err = run(capsys, *line(folder, "vectors.npy"))
    assert code == 130 and "vectors.npy.parts; continue with the same line and --resume" in err
    assert not (place / "vectors.npy").exists()
    monkeypatch.setattr(embedder.Embedder, "_batch", batch)
    code, _, err = run(capsys, *line(folder, "vectors.npy"))
    assert code == 2 and "holds an interrupted run; continue with --resume" in err
    code, _, err = run(capsys, *line(folder, "vectors.npy", "--resume", "--spans", 5))
    assert code == 2 and "the run was started with spans=7, now it is 5" in err
    code, out, err = run(capsys, *line(folder, "vectors.npy", "--resume"))
    assert code == 0 and "Continuing after 7 of 9 documents." in out, err
    assert (place / "vectors.npy").read_bytes() == (place / "whole.npy").read_bytes()
    assert not (place / "vectors.npy.parts").exists()


def test_only_a_file_of_ours_is_replaced(place, folder, capsys):
    from pyarrow import Table, parquet

    np.save("mine.npy", np.zeros((2, 3)))
    parquet.write_table(Table.from_pydict({"vector": [1, 2]}), "mine.parquet")
    (place / "text.parquet").write_text("not a table")
    (place / "ours.npy.parts").mkdir()
    (place / "ours.npy.parts" / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
    for name in ("mine.npy", "mine.parquet", "text.parquet"):
        for more, said in (
            ((), "exists; choose another file, or pass --overwrite"),
            (("--overwrite",), "was not written by"),
        ):
            code, _, err = run(capsys, *line(folder, name, *more))
            assert (code, len(err.splitlines())) == (2, 1) and said in err
    code, _, err = run(capsys, *line(folder, "ours.npy", "--overwrite"))
    assert code == 2 and "'notes.txt'" in err and len(err.splitlines()) == 1
    assert {path: path.read_bytes() for path in place.rglob("*") if path.is_file()} == before
    assert run(capsys, *line(folder, "vectors.parquet"))[0] == 0
    assert run(capsys, *line(folder, "vectors.parquet"))[0] == 2
    code, _, err = run(capsys, *line(folder, "vectors.parquet", "--overwrite"))
    assert code == 0, err
    code, _, err = run(
        capsys, "embed", folder, "--dataset", "vectors.parquet", "--output", "vectors.parquet", "--overwrite"
    )
    assert code == 2 and "which is the data set" in err


def refused(capsys, said, *words):
    # Saving a model shows a bar.
    capsys.readouterr()
    code, _, err = run(capsys, *words)
    assert code == 2 and said in err and len(err.splitlines()) == 1, err


def test_what_is_no_converted_encoder_with_a_pooling_is_refused(place, folder, capsys, tmp_path):
    refused(capsys, "expected the name of a .parquet or .npy file", *line(folder, "vectors.csv"))
    refused(capsys, "is not a converted checkpoint", *line(make_original(tmp_path / "bert"), "v.npy"))
    refused(capsys, "has no modules.json, so it is not an embedder", *line(make_text(tmp_path / "plain"), "v.npy"))
    gpt = make_embedder(tmp_path / "gpt2", name="gpt2", mode="lasttoken")
    refused(capsys, "whose attention is causal, expected an encoder", *line(gpt, "v.npy"))
    first = make_embedder(tmp_path / "first", mode="cls")
    refused(capsys, "does not take the mean over its tokens", *line(first, "v.npy"))
    other = make_embedder(tmp_path / "other")
    (other / "modules.json").write_text(
        json.dumps([*EMBEDDER, {"idx": 3, "name": "3", "path": "", "type": "mine.Own"}])
    )
    refused(capsys, "names the module 'mine.Own', expected modules of sentence-transformers", *line(other, "v.npy"))
    refused(capsys, "the longest document has 58 tokens, so a span", *line(folder, "v.npy", "--spans", 59))
    refused(capsys, "spans: got 0", *line(folder, "v.npy", "--spans", 0))
    (place / "docs.jsonl").write_text(json.dumps({"sentence1": "the cat", "sentence2": "a mat"}) + "\n")
    refused(capsys, "got rows with two texts, expected one", *line(folder, "v.npy"))
    assert not list(place.glob("v.npy*")) and not list(place.glob(".*"))


def test_documents_alone_of_a_pooling_without_spans(tmp_path):
    folder = make_embedder(tmp_path / "first", mode="cls")
    opened = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    found = linearize.embed(opened, documents(3))
    np.testing.assert_allclose(found.rows["vector"], opened.encode(documents(3)), atol=2e-6)
    assert not len(found.spans)


@pytest.mark.parametrize("texts", [[], ["a", 3], [None]])
def test_python_refuses_what_is_no_list_of_texts(opened, texts):
    with pytest.raises(LinearizeError, match="expected a list of texts"):
        linearize.embed(opened, texts)
    with pytest.raises(LinearizeError, match="spans: got '7', expected a whole number"):
        linearize.embed(opened, ["a"], spans="7")
