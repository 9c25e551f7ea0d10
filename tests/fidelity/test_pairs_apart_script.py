"""scripts/pairs_apart.py: every row has both sentences, and as many other words between them as asked for."""

import gzip
import json

from support.scripts import script


def test_rows(tmp_path):
    for name, count in (("train", 3), ("test", 2)):
        with gzip.open(tmp_path / f"{name}.txt.gz", "wt", encoding="utf-8") as file:
            file.write(" ".join(f"{name}{number}" for number in range(20)))
        with gzip.open(tmp_path / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            for number in range(count):
                file.write(json.dumps({"sentence1": f"é {number} .", "sentence2": "b c", "label": number % 2}) + "\n")
    script("pairs_apart").main([str(tmp_path), str(tmp_path), "--words", "5", "--output", str(tmp_path / "out")])
    written = {name: (tmp_path / "out" / f"{name}.jsonl").read_text("utf-8") for name in ("train", "test")}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in written.items()}
    assert [row["label"] for row in rows["train"]] == [0, 1, 0] and len(rows["test"]) == 2
    assert rows["train"][1]["text"] == "é 1 . train5 train6 train7 train8 train9 b c"
    assert rows["test"][1]["text"].split()[3:8] == [f"test{number}" for number in (7, 8, 9, 10, 11)]
