"""Conversations: which tokens are the assistant's, what is refused, and that a converted model learns from them."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from support.checkpoints import WORDS, make_original, make_text, tokenizer
from support.command_lines import run

from linearize.core.errors import ConfigError, DataError
from linearize.training.stage_two.config import DataOptions
from linearize.training.stage_two.prepare import prepare
from linearize.training.stage_two.rows import IGNORED
from linearize.training.stage_two.task_types import chat
from linearize.training.stage_two.task_types.chat import encode
from linearize.training.stage_two.tasks import task

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ('user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<s> ' + m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ '<s> ' + (m['content'] if loop.last else 'cat') + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> ' }}{% endif %}"
)


def chatty(template=TEMPLATE, side="right"):
    made = tokenizer(ends=False)
    made.chat_template, made.padding_side = template, side
    return made


def turns(*texts):
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def write(path, rows, column="messages"):
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return str(path)


def conversations(count):
    """The assistant says the next two words."""
    chats = []
    for place in range(count):
        first, second, third, *_ = (WORDS * 3)[place % len(WORDS) :]
        chats.append(turns(first, f"{second} {third}", second, third))
    return chats


def test_the_assistants_tokens_are_those_behind_its_prompt():
    words = chatty()
    [(ids, spoken)] = encode(words, turns("the cat", "sat on", "a", "mat"))
    unknown, begin, end = words.unk_token_id, words.bos_token_id, words.eos_token_id
    the, cat, sat, on, a, mat = words.convert_tokens_to_ids(["the", "cat", "sat", "on", "a", "mat"])
    assert ids == [
        begin, unknown, the, cat, end, begin, unknown, sat, on, end, begin, unknown, a, end, begin, unknown, mat, end,
    ]  # fmt: skip
    assert [place for place, own in enumerate(spoken) if own] == [7, 8, 9, 16, 17]


def test_a_first_turn_of_the_assistant_begins_behind_its_prompt_too():
    """What the template writes before it, such as a system prompt of its own, was learned as the assistant's."""
    words = chatty("{{ 'the mat ' }}" + TEMPLATE)
    [(ids, spoken)] = encode(words, [*turns("cat", "sat")[1:], *turns("a", "mat")])
    the, mat, sat = words.convert_tokens_to_ids(["the", "mat", "sat"])
    unknown, begin, end = words.unk_token_id, words.bos_token_id, words.eos_token_id
    assert ids[:7] == [the, mat, begin, unknown, sat, end, begin]
    assert spoken[:7] == [False] * 4 + [True] * 2 + [False] and sum(spoken) == 4


def test_rows_are_cut_and_filled_up_behind_whatever_the_tokenizer_does():
    rows = [{"messages": turns("the", "cat sat")}, {"messages": turns("the cat sat on a mat", "and")}] * 2
    tables = {"train": Dataset.from_list(rows), "validation": Dataset.from_list(rows)}
    found = {}
    for side in ("right", "left"):
        data = prepare(task("chat"), chatty(side=side), DataOptions(max_length=9), data=tables)
        batch = data.collate([data.train[0], data.train[1]])
        found[side] = batch
        # The second conversation is cut before the assistant says anything.
        assert "; 4 left out, as no answer of the assistant fits" in data.description
        assert len(data.train) == len(data.validation) == 2
    assert all(torch.equal(found["left"][name], found["right"][name]) for name in found["left"])
    labels = found["left"]["labels"][0]
    assert [place for place, label in enumerate(labels.tolist()) if label != IGNORED] == [6, 7, 8]


def test_what_cannot_be_read_is_refused(tmp_path):
    good = write(tmp_path / "good.jsonl", conversations(12))
    with pytest.raises(ConfigError, match="without a chat template"):
        prepare(task("chat"), tokenizer(), DataOptions(max_length=16), data=good)
    with pytest.raises(ConfigError, match="writes what precedes an answer differently once the answer follows"):
        prepare(task("chat"), chatty(FORGETFUL), DataOptions(max_length=16), data=good)
    with pytest.raises(DataError, match="no column 'messages'"):
        other = write(tmp_path / "other.jsonl", conversations(12), "dialogue")
        prepare(task("chat"), chatty(), DataOptions(max_length=16), data=other)
    prepare(task("chat", columns=("dialogue",)), chatty(), DataOptions(max_length=16), data=other)
    for number, rows in enumerate(([["the", "cat"]] * 12, [[{"role": "user"}]] * 12, [[]] * 12)):
        with pytest.raises(DataError):
            prepare(task("chat"), chatty(), DataOptions(max_length=16), data=write(tmp_path / f"{number}.jsonl", rows))
    for message in (
        {"role": "judge", "content": "the"},
        {"role": "user", "content": [{"type": "text", "text": "the"}]},
    ):
        odd = write(tmp_path / "odd.jsonl", [[message, *turns("the", "cat")[1:]]] * 12)
        with pytest.raises(DataError, match="the chat template refuses a conversation"):
            prepare(task("chat"), chatty(), DataOptions(max_length=16), data=odd)
    with pytest.raises(DataError, match="in which the assistant says nothing within 16 tokens"):
        silent = write(tmp_path / "silent.jsonl", [turns("the")] * 12)
        prepare(task("chat"), chatty(), DataOptions(max_length=16), data=silent)


def test_a_converted_model_learns_what_to_say(tmp_path, capsys):
    """Tuned and measured by the command line; the loss is the model's own on the assistant's tokens alone."""
    make_text(tmp_path / "linear", "llama", head="AutoModelForCausalLM")
    make_original(tmp_path / "llama", "llama", "AutoModelForCausalLM")
    for name in ("linear", "llama"):
        chatty().save_pretrained(tmp_path / name)
    path = write(tmp_path / "chats.jsonl", conversations(60))
    line = ["--task", "chat", "--dataset", path, "--max-length", "32", "--device", "cpu", "--json"]
    code, before, err = run(capsys, "evaluate", tmp_path / "linear", *line)
    assert code == 0, err
    code, after, err = run(
        capsys, "finetune", tmp_path / "linear", *line, "--output", tmp_path / "out", "--epochs", "12",
        "--learning-rate", "1e-2", "--batch-size", "8",
    )  # fmt: skip
    assert code == 0, err
    first, last = json.loads(before)["score"], json.loads(after)["score"]
    assert first > 15 and last < 0.5 * first


def test_the_figure_is_that_of_the_assistants_tokens(tmp_path):
    from support.tiny import original

    model = original("gpt2", "AutoModelForCausalLM", vocab_size=len(chatty())).eval()
    data = prepare(
        task("chat"), chatty(), DataOptions(max_length=32), data=write(tmp_path / "c.jsonl", conversations(20))
    )
    batch = data.collate([data.validation[place] for place in range(len(data.validation))])
    with torch.no_grad():
        out = model(**batch)
    found = data.type.compute_metrics(data.type.reduce(out.logits, batch["labels"]).numpy(), None)
    assert found["perplexity"] == pytest.approx(float(out.loss.exp()), rel=1e-5)


def test_conversations_to_train_on_are_not_encoded_to_measure(tmp_path, monkeypatch):
    (tmp_path / "chats").mkdir()
    for split, count in (("train", 30), ("validation", 5)):
        write(tmp_path / "chats" / f"{split}.jsonl", conversations(count))
    coded, own = [], chat.encode
    monkeypatch.setattr(chat, "encode", lambda *given: coded.append(1) or own(*given))
    options = DataOptions(max_length=32, trains=False)
    data = prepare(task("chat"), chatty(), options, data=str(tmp_path / "chats"))
    assert len(coded) == len(data.validation) == 5


THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' }}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.last and loop.last %}{{ 'and and ' }}{% endif %}"
    "{{ m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)
"""As Qwen 3's: thoughts stand before the last answer alone."""


def spoken_texts(words, rows):
    """What the assistant says in each row, and the whole rows."""
    said = [words.decode([token for token, own in zip(*row, strict=True) if own]) for row in rows]
    return said, [words.decode(ids) for ids, _ in rows]


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_answer_is_learned_once_as_the_template_wants_it_written(count, last):
    """A template that writes the last answer differently was refused from the second answer on."""
    words = chatty(THINKING)
    given = turns(*[f"the {word}" if place % 2 else "cat" for place, word in enumerate((WORDS * 2)[: 2 * count])])
    given = given if last else [*given, {"role": "user", "content": "mat"}]
    said, whole = spoken_texts(words, encode(words, given))
    answers = [message["content"] for message in given if message["role"] == "assistant"]
    assert sorted(said) == sorted(f"and and {answer} </s>" for answer in answers)
    for answer, text in zip(said, whole, strict=True):
        assert text.endswith(answer) and text.count("and and") == 1
    # What an answer is learned from is what the model reads when it has to write it.
    places = [place for place, message in enumerate(given) if message["role"] == "assistant"]
    prompts = [words.apply_chat_template(given[:place], tokenize=False, add_generation_prompt=True) for place in places]
    begun = [text.removesuffix(answer).strip() for text, answer in zip(whole, said, strict=True)]
    assert sorted(begun) == sorted(
        words.decode(words(prompt, add_special_tokens=False)["input_ids"]) for prompt in prompts
    )


def test_answers_of_one_conversation_are_held_out_together(tmp_path):
    from linearize.training.stage_two.prepare import hold_out

    path = write(tmp_path / "chats.jsonl", [turns("the", "cat", "a", "mat") for _ in range(20)])
    data = hold_out(prepare(task("chat"), chatty(THINKING), DataOptions(max_length=32), data=path), 4)
    owners = [{part[place]["owner"] for place in range(len(part))} for part in (data.train, data.selection)]
    assert len(data.selection) == 4 and not owners[0] & owners[1]


CALLING = (
    "{% for tool in tools or [] %}{{ tool.function.name + ' ' }}{% endfor %}"
    "{% for m in messages %}{{ '<s> ' + m['role'] + ' ' }}"
    "{% if m.content is string %}{{ m.content + ' ' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
    "{{ f.name + ' ' + f.arguments.keys()|join(' ') + ' ' }}{% endfor %}"
    "{{ '</s> ' }}{% endfor %}{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)


def called(name, **arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [*turns("the"), answer, {"role": "tool", "content": "mat"}, {"role": "assistant", "content": "and"}]


def schema(*names):
    return [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]


@pytest.mark.parametrize("kind", [list, json.dumps])
def test_tool_calls_and_tools_are_written(kind, tmp_path):
    rows = [{"messages": called("cat", sat="on"), "tools": kind(schema("cat"))}] * 6
    rows += [{"messages": called("ran", fast="1"), "tools": kind(schema("ran", "cat"))}] * 6
    (tmp_path / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = chatty(CALLING)
    chosen = DataOptions(max_length=32)
    data = prepare(task("chat"), words, chosen, data=str(tmp_path / "calls.jsonl"))
    row = data.train[0]
    labels = [token for token in row["labels"] if token != IGNORED]
    # The table gave the arguments of both functions to each call.
    assert words.decode(labels) == "cat sat </s> and </s>"
    assert words.decode(row["input_ids"]).startswith("cat <s>")
    plain = {"messages": called("cat", sat="on")}
    for template, more, match in (
        (TEMPLATE.replace("'assistant')", "'assistant', 'tool')"), {}, "got tool_calls with the function 'cat', which"),
        (CALLING, {"tools": schema("mat", "slept")}, "got tools with the function 'slept', which"),
        (CALLING, {"tools": "cat"}, "got 'cat' in column 'tools', expected a list of JSON schemas"),
        (CALLING, {"messages": [*turns("the"), {"role": "assistant", "content": None}]}, "without content and without"),
    ):
        text = chatty(template.replace("tools or []", "(tools or [])[:1]"))
        (tmp_path / "bad.jsonl").write_text((json.dumps(plain | more) + "\n") * 12)
        with pytest.raises(DataError, match=match) as error:
            prepare(task("chat"), text, chosen, data=str(tmp_path / "bad.jsonl"))
        assert "\n" not in str(error.value)
