"""Write the sweep's results into docs/models.md and docs/sweep.md: `table.py RESULTS.jsonl ...`, the newest last."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "architectures.json"
NO_INPUTS = "no made-up input fits the tiny model: pass `--example-inputs`"
OWN_WAY = "interprets masks, or calls attention, in its own way; converted it would compute something else"


def reason(result: dict[str, Any]) -> str:
    """Return in a few words why a model is refused."""
    message = result["message"]
    if message.startswith("a trial run of") or ", expected input_ids" in message or "no vocab_size" in message:
        return NO_INPUTS
    if "no longer runs once its attention" in message or "something else once its attention" in message:
        return OWN_WAY
    if "no longer be built" in message:
        return "the name of the attention implementation selects its classes"
    if "is not a Transformer" in message:
        return "no attention ran"
    if "attention in its head only" in message:
        return "its attention is in the head, and a plan covers only the body"
    if "only cross-attention" in message:
        return "cross-attention"
    if found := re.search(r"cannot be reached: (\w+),? ([^;]*)", message):
        # Without the class, so that all classes with this reason share a row.
        return shortened(found[2])
    found = re.search(r"can be converted: (.*)", message)
    reasons = found[1].split("; ") if found else [message.split(";")[0]]
    # If there are several reasons, prefer one that a kernel cannot express.
    chosen = next((text for text in reasons if text.endswith("which a kernel cannot honour")), reasons[0])
    chosen = re.sub(r" \(\w+\)", "", chosen) if "attention code" in chosen or "did not run" in chosen else chosen
    return shortened(chosen)


def shortened(text: str) -> str:
    """Return the reason of a message in the words of the tables."""
    text = text.removesuffix(", which a kernel cannot honour").removeprefix("scores carry ")
    # The words of older results.
    text = text.replace("attention code of its own", "its own attention code")
    text = text.replace("a mask of the model's own", "the model's own mask")
    linear = r", which is (linear in .* already|already linear in [\w ]+)"
    return re.sub(linear, ", so it is already linear in the number of patches", text)


def outcome(result: dict[str, Any]) -> str:
    """Return whether a model works, and if not, why."""
    softmax = f"; {result['softmax']} stays softmax" if result.get("softmax") else ""
    return {
        "works": "works" + (f" {result['message']}" if result["message"] else "").replace(" ;", ";") + softmax,
        "refused": f"refused: {reason(result)}",
        "failed": f"fails at {result['step']}",
        "not tried": "not tried: the rule for tiny configs does not fit it",
    }[result["status"]]


def by_name(results: list[dict[str, Any]]) -> str:
    """Return a table with one row per model; names that begin with timm/ come last."""
    rows = sorted((result["file"].startswith("timm/"), result["name"], outcome(result)) for result in results)
    return "\n".join(["| model | result |", "|---|---|", *(f"| {name} | {what} |" for _, name, what in rows)])


def render(results: list[dict[str, Any]]) -> str:
    """Return the table of outcomes."""
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    order = {"works": 0, "refused": 1, "failed": 2, "not tried": 3}
    for result in results:
        status = result["status"]
        groups[order[status], outcome(result)].append(result["name"].removeprefix("timm/"))
    counts = Counter((r["status"], r.get("softmax", "") if r["status"] == "works" else "") for r in results)
    words = {"": "work", "a tower": "work but keep a tower softmax", "a part": "work but keep a part softmax"}
    said = {("works", part): text for part, text in words.items()} | {(x, ""): x for x in order if x != "works"}
    commits = Counter(result["commit"] for result in results if "commit" in result)
    at = "; ".join(f"{count} tried at commit {commit}" for commit, count in sorted(commits.items()))
    lines = [
        f"{len(results)} models: "
        + ", ".join(f"{counts[kind]} {text}" for kind, text in said.items() if counts[kind])
        + (f"; {at}." if at else "."),
        "",
        "| outcome | models | which |",
        "|---|---:|---|",
    ]
    lines += [f"| {what} | {len(names)} | {', '.join(sorted(names))} |" for (_, what), names in sorted(groups.items())]
    return "\n".join(lines)


def page(results: list[dict[str, Any]]) -> str:
    """Return the text between the markers of docs/sweep.md."""
    of_timm = [result for result in results if result["file"].startswith("timm/")]
    parts = [("transformers", [result for result in results if result not in of_timm]), ("timm", of_timm)]
    return "\n\n".join(f"### {name}\n\n{render(some)}" for name, some in parts if some)


def main() -> None:
    """Merge new results into the results file, and write both pages."""
    merged = {result["file"]: result for result in json.loads(RESULTS.read_text("utf-8"))} if RESULTS.exists() else {}
    for path in sys.argv[1:]:
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            merged[result["file"]] = result
    results = [merged[key] for key in sorted(merged)]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for name, text in (("models", by_name(results)), ("sweep", page(results))):
        path, begin, end = ROOT / "docs" / f"{name}.md", f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = path.read_text(encoding="utf-8").split(begin)
        path.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
