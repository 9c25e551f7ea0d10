"""What people see: help, suggestions, colours, narrow terminals, progress, and what Ctrl-C leaves behind."""

import io
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import forks
from support.checkpoints import make_original, make_text, texts
from support.command_lines import run

from linearize.cli import _output, _progress, main
from linearize.cli._output import Screen, console, print_json, table
from linearize.cli._progress import Heartbeat, StepProgress, at_work, long, numbered, where
from linearize.cli.main import VERBS, build_parser
from linearize.core.errors import ConfigError
from linearize.jobs.events import Advanced, Logged, Saved, Started, StepDone
from linearize.training.alignment.loop import AlignStep
from linearize.training.stage_one import observer
from linearize.training.stage_one.loop import StepReport
from linearize.training.stage_two.progress import TuneStep
from linearize.training.stage_two.save import last_checkpoint

WIDE = "a very long cell that has to be folded when the terminal is not wide enough for it " * 2


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A colour terminal of 40 columns; it becomes standard output with `redirect_stdout`."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("terminal")
    texts(root, 48)
    make_original(root / "bert")
    make_text(root / "linear")
    shutil.copytree(root / "linear", root / "linear2")
    return root


def plain(text):
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def options_of(verb):
    return [name for action in build_parser(verb)._actions for name in action.option_strings if name.startswith("--")]


@pytest.mark.parametrize("verb", VERBS)
def test_a_mistyped_verb_or_option_is_recognised(verb, capsys):
    code, _, err = run(capsys, verb[:-1] + verb[-1] * 2)
    assert (code, f"Did you mean '{verb}'?" in err) == (2, True)
    for option in options_of(verb):
        code, _, err = run(capsys, verb, "x", f"{option}{option[-1]}", "1")
        assert code == 2 and f"unknown option '{option}{option[-1]}'. Did you mean {option}?" in err
        assert len(err.strip().splitlines()) == 1


def test_what_stands_behind_two_dashes_is_no_option(folders, capsys):
    code, _, err = run(capsys, "inspect", "--", "--nothing")
    assert code == 2 and "unknown option" not in err


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_of_the_help_is_a_line_that_parses(verb, tmp_path, monkeypatch):
    """Examples grow stale where nobody types them: every option and value of theirs is one of the verb's."""
    import shlex

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    lines = [line for line in build_parser(verb).epilog.splitlines() if line.strip().startswith("linearize ")]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[1] == verb:
            build_parser(verb).parse_args(words[2:])


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_is_explained(verb):
    assert all(action.help for action in build_parser(verb)._actions)


def test_a_narrow_terminal_is_never_overrun(terminal):
    title = "A title that is itself longer than forty columns are wide"
    with redirect_stdout(terminal):
        console().print(table(title, ["name", "what"], [["a", WIDE]]))
        console().print(WIDE)
    lines = plain(terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 40 and len(lines) > 8
    assert "".join(WIDE.split()) in re.sub(r"[\s│]", "", plain(terminal.getvalue()))


@pytest.mark.parametrize("width", [30, 60, 80, 120])
def test_words_stay_whole(terminal, monkeypatch, width):
    """Where columns as wide as their longest words do not fit, a table becomes a list."""
    monkeypatch.setenv("COLUMNS", str(width))
    cells = [["encoder.layer.0.self", "hedgehog", "both ways"], ["encoder.layer.1.self", "softmax", "kept on request"]]
    with redirect_stdout(terminal):
        console().print(table("plan", ["module", "becomes", "why it stays"], cells, right=(1,)))
    text = plain(terminal.getvalue())
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    words = {word for row in cells for cell in row for word in cell.split()}
    assert words <= set(re.sub("[│┃]", " ", text).split())
    # 20 + 8 + 7 letters, and borders of 10.
    assert ("┃" in text) is (width >= 45)
    if width == 30:
        assert "  becomes" in text and text.index("encoder.layer.0.self") < text.index("hedgehog")


@pytest.mark.parametrize("width", [121, 120, 116, 110, 100])
def test_a_table_is_never_cut_at_its_right_edge(terminal, monkeypatch, width):
    """The table behind stage one needs 121 columns, and lost its right border, then its last column, in fewer."""
    monkeypatch.setenv("COLUMNS", str(width))
    columns = ["layer", "kernel", "KL (nats/query)", "total variation", "negative weights", "output error"]
    cells = ["bert.encoder.layer.0.attention.self", "hedgehog", *["0.468 > 0.306"] * 4]
    with redirect_stdout(terminal):
        console().print(table("fidelity", columns, [cells], right=(2, 3, 4, 5)))
    lines = plain(terminal.getvalue()).splitlines()[1:]
    assert {len(line.rstrip()) for line in lines} == {width}
    assert all(line.rstrip()[-1] in "┓┃┩│┘" for line in lines)
    assert {word for line in lines for word in re.sub("[│┃]", " ", line).split()} >= {"0.468", "error", cells[0]}


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch):
    """What was piped was 120 wide whatever COLUMNS said."""
    monkeypatch.setenv("COLUMNS", "60")
    assert console().width == 60
    for unknown in ("0", "", "wide"):
        # At 0, rich printed nothing.
        monkeypatch.setenv("COLUMNS", unknown)
        assert console().width == 120
    monkeypatch.delenv("COLUMNS")
    assert console().width == 120


def test_names_that_an_encoding_lacks_are_escaped():
    """A conversion into a folder with such a name ended in a UnicodeEncodeError when it was done."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252", write_through=True)
    with redirect_stdout(stream):
        console().print("Saved caf\xe9-\u540d.")
    assert stream.buffer.getvalue() == b"Saved caf\xe9-\\u540d.\n"


def unread(words):
    """Run a command line whose output goes to a pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    sys.exit(main(words))


def test_a_job_outlives_the_reader_of_its_output(folders, tmp_path):
    """rich ended it with code 1, and nothing was written or said; `kernels | head` ended with 1 too."""
    line = ["convert", str(folders / "bert"), "--distill-steps", "0", "--output", str(tmp_path / "out")]
    for words in (["kernels"], line):
        assert forks.run(unread, words) == forks.Done(0, "", "")
    assert (tmp_path / "out" / "config.json").exists()


def test_no_color_is_respected(terminal, monkeypatch):
    colour = re.compile(r"\x1b\[[0-9;]*[34][0-9]")
    with redirect_stdout(terminal):
        console().print("warm 42", style="red")
    assert colour.search(terminal.getvalue())
    monkeypatch.setenv("NO_COLOR", "1")
    begin = len(terminal.getvalue())
    with redirect_stdout(terminal):
        console().print("warm 42", style="red")
        show(report(1), report(2, held_out=2.0))
    written = terminal.getvalue()[begin:]
    assert "warm 42" in written and "held out 2.0000" in " ".join(plain(written).split())
    assert not colour.search(written)


def report(step, held_out=None):
    return StepReport(step, 9, {"a": 1.0, "b": 3.0}, held_out, 0.1, 2.0)


def show(*reports):
    progress = StepProgress(console())
    for one in reports:
        progress(one)
    progress.stop()


def heard(work, monkeypatch, stream):
    monkeypatch.setattr(_progress, "EVERY", 0.1)
    with redirect_stdout(stream):
        out = console()
        with Heartbeat(out, "reading") as beat:
            work(out, beat)
    return stream.getvalue().splitlines()


def test_a_log_hears_of_long_work(monkeypatch):
    log = io.StringIO()

    def work(out, beat):
        for what in ("reading", "writing"):
            beat.what = what
            while log.getvalue().count(what) < 2:
                time.sleep(0.01)

    lines = heard(work, monkeypatch, log)
    assert len(lines) >= 4 and all(re.fullmatch(r"\.\.\. (reading|writing) \(\d+ s so far\)", line) for line in lines)
    assert "reading" in lines[0] and "writing" in lines[-1]


def test_a_log_hears_of_longer_work_less_often():
    """A run of 70 minutes wrote 518 such lines."""
    beat = Heartbeat(console(), "reading")
    lines, now = 0, 0.0
    while now < 4200:
        now += max(_progress.EVERY, min(_progress.SELDOM, _progress.SHARE * now))
        lines += 1
    beat.start = time.monotonic() - 1000
    assert lines < 60 and beat._silence() == pytest.approx(100, abs=1)
    beat.start = time.monotonic()
    assert beat._silence() == _progress.EVERY


def test_a_heartbeat_is_for_silence_and_for_logs(monkeypatch, terminal):
    now, spoken = [0.0], [5.0, 12.0, 15.0, 30.0]
    for module in (_output, _progress):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(seconds):
        """Let the time pass, with what is said in it; the work is over after 37 seconds."""
        end = now[0] + seconds
        while spoken and spoken[0] <= end:
            now[0] = spoken.pop(0)
            out.print("said")
        now[0] = end
        return end > 37

    with redirect_stdout(io.StringIO()) as log:
        out = console()
        beat = Heartbeat(out, "reading")
        monkeypatch.setattr(beat, "_over", SimpleNamespace(wait=wait))
        beat._run()
    assert log.getvalue().splitlines() == ["said"] * 3 + ["... reading (23 s so far)", "said"]
    monkeypatch.undo()
    assert heard(lambda out, beat: time.sleep(0.3), monkeypatch, terminal) == []


def test_the_demo_and_convert_have_a_heartbeat(monkeypatch, capsys):
    """Their work takes minutes on a busy machine: never ten seconds of a log without a line."""
    assert _progress.EVERY < 10
    monkeypatch.setattr(_progress, "EVERY", 0.1)
    beats, say = threading.Semaphore(0), Screen.print

    def spy(self, *objects, **options):
        say(self, *objects, **options)
        if str(objects[0]).startswith("... loading the model"):
            beats.release()

    def slow(*args, **kwargs):
        beats.acquire()
        beats.acquire()
        raise ConfigError("stopped")

    monkeypatch.setattr(Screen, "print", spy)

    monkeypatch.setattr("linearize.jobs.demo.run_demo", slow)
    monkeypatch.setattr("linearize.cli.train.convert_checkpoint", slow)
    for verb in (["demo"], ["convert", "bert", "--output", "nowhere"]):
        code, out, _ = run(capsys, *verb)
        assert code == 2 and out.count("... loading the model") >= 2


def test_make_says_that_it_still_installs(tmp_path):
    beat = Path(__file__).parents[2] / ".ci" / "beat"
    assert subprocess.run([beat, "x", "sh", "-c", "exit 3"], check=False).returncode == 3
    log = tmp_path / "log"
    waits = f"until grep -q so.far {log}; do sleep 1; done"
    with log.open("w") as file:
        environment = os.environ | {"BEAT_SECONDS": "2"}
        subprocess.run([beat, "installing", "sh", "-c", waits], env=environment, stdout=file, check=True)
    assert log.read_text().startswith("... installing (2 s so far)\n")


def test_progress_is_a_bar_on_a_terminal_and_lines_in_a_file(terminal, monkeypatch):
    with redirect_stdout(terminal):
        show(report(1), report(2))
    assert re.search(r"stage one 2/9 \S+ loss 2\.000 *$", plain(terminal.getvalue()))
    monkeypatch.setenv("COLUMNS", "120")
    with redirect_stdout(terminal):
        show(report(1), report(2))
    assert re.search(
        r"stage one ━+\S*\s*━* 2/9 .* loss 2\.000 \(layers 1\.00 to 3\.00\) *$", plain(terminal.getvalue())
    )
    file = io.StringIO()
    with redirect_stdout(file):
        show(report(1), report(2), report(3, held_out=2.5))
    assert "\x1b" not in file.getvalue() and "\r" not in file.getvalue()
    first, last = file.getvalue().splitlines()
    assert first.startswith("step 1/9, 2 s, 16 s left, 0.5 steps/s: loss 2.0000")
    assert "step 3/9" in last and "held out 2.5000" in last


def waiting():
    out = console()
    with at_work(out, "loading [the] model") as work:
        work(Started("measuring"))
        work(Advanced(2, 4))
        work.progress.bar and work.progress.bar.refresh()
        work(StepDone(report(1)))
        out.print(work.beat.what)
        work(StepDone(report(9)))
        out.print(work.beat.what)


def test_a_terminal_shows_what_is_running_between_the_stages(terminal, monkeypatch):
    """Before that, a terminal stayed empty while heads were chosen or a model was measured, which takes minutes."""
    monkeypatch.setenv("COLUMNS", "120")
    with redirect_stdout(terminal):
        waiting()
    written = plain(terminal.getvalue())
    shown = [
        r"\.\.\. loading \[the\] model 0:00:00",
        r"\.\.\. measuring, 2/4 0:00:00",
        r"stage one ━.* 9/9 ",
        r"measuring the result\r?\n",
        r"\.\.\. measuring the result 0:00:00",
    ]
    assert re.search(".*".join(shown), written, re.DOTALL)
    # A bar stays on the screen; what was running is erased at the end.
    assert terminal.getvalue().rstrip("\r\n").endswith("\x1b[1A\x1b[2K")
    with redirect_stdout(io.StringIO()) as log:
        waiting()
    assert log.getvalue().splitlines() == [
        "step 1/9, 2 s, 16 s left, 0.5 steps/s: loss 2.0000; per layer a:1.00 b:3.00",
        "training, step 1/9, 2 s, 16 s left, 0.5 steps/s: loss 2.0000",
        "measuring the result",
    ]


def test_lines_of_a_log_have_names_speed_and_memory(monkeypatch):
    losses = {"encoder.layer.0": 1.0, "encoder.layer.1": 3.0, "output": 0.5, "logits/logits": 0.25}
    step = AlignStep(3, 9, losses, 2.0, 0.1, 2.0, "end to end", 4.0, tokens=2469)
    assert long(step) == (
        "alignment, end to end, step 3/9, 2 s, 4 s left, 1,234 tokens/s: loss 4.0000, held out 2.0000; "
        "per layer 0:1.00 1:3.00 output:0.50 logits:0.25"
    )
    # The last line of pictures, which have no tokens.
    last = [AlignStep(9, 9, losses, 2.0, 0.1, 18.0, "end to end", 4.0), TuneStep(9, 9, 4.0, 18.0, 2.0, 0)]
    assert [where(step) for step in last] == [
        "alignment, end to end, step 9/9, 18 s, 0 s left, 0.5 steps/s", "step 9/9, 18 s, 0 s left, 0.5 steps/s",
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 23_456_000_000)
    assert "4 s left, 1,234 tokens/s, up to 23.5 GB: loss 4.0000" in long(step)
    assert numbered(["a.0.b.1", "a.0.b.2"]) == ["a.0.b.1", "a.0.b.2"]
    assert numbered(["encoder.0", "decoder.0"]) == ["encoder.0", "decoder.0"]


def test_the_log_of_stage_two_names_its_figures_and_gives_each_measurement_once():
    entry = {"eval_loss": 0.68624, "eval_accuracy": 2 / 3, "eval_score": 2 / 3, "eval_selection": 0.5, "epoch": 1.0}
    log = io.StringIO()
    with redirect_stdout(log), at_work(console(), "tuning") as work:
        for step, accuracy in ((2, 0.5), (3, 1.0), (4, 1.0)):
            work(Logged({"step": step, "steps": 4, **entry, "eval_accuracy": accuracy}))
        for step in (1, 2):
            work(Logged({"step": step, "steps": 4, "loss": 0.5, "grad_norm": 12345.0}))
        # After its last step the trainer measures the kept state again.
        for last in ({"train_loss": 0.75}, {**entry, "eval_accuracy": 0.5}):
            work(Logged({"step": 4, "steps": 4, **last}))
    assert work.measured_step == 4
    measured = "validation loss 0.6862, accuracy {}, held-out loss 0.5"
    assert log.getvalue().splitlines() == [
        f"step 2/4: {measured.format(0.5)}",
        f"step 3/4: {measured.format(1)}",
        f"step 4/4: {measured.format(1)}",
        "step 1/4: loss 0.5, gradient norm 12,345",
        "step 2/4: loss 0.5, gradient norm 12,345",
        "step 4/4: mean loss 0.75",
    ]


def test_json_has_neither_colours_nor_folded_lines(terminal):
    with redirect_stdout(terminal):
        print_json({"long": WIDE, "nan": float("nan")})
    assert "\x1b" not in terminal.getvalue() and WIDE in terminal.getvalue()


def on_terminal(name, words):
    for number in (1, 2):
        os.dup2(os.open(name, os.O_RDWR | os.O_NOCTTY), number)
    for variable in ("COLUMNS", "LINES", "FORCE_COLOR"):
        os.environ.pop(variable, None)
    sys.exit(main(words))


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are a matter of POSIX")
def test_a_real_terminal(tmp_path):
    """The whole program on a pseudo-terminal of 60 columns, without colours."""
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 60, 0, 0))
    environment = {"TERM": "xterm-256color", "NO_COLOR": "1"}
    process = forks.start(on_terminal, os.ttyname(follower), ["recipes"], environment=environment, said=tmp_path)
    # Until the program has ended this end stays open, so that it is there before the program opens it.
    threading.Thread(target=lambda: (process.join(), os.close(follower))).start()
    written = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # How Linux says that the other end is closed.
            break
        if not part:
            break
        written += part
    os.close(leader)
    text = written.decode()
    assert process.exitcode == 0, text
    assert not re.search(r"\x1b\[[0-9;]*[34][0-9]m", text)
    assert 40 < max(len(line) for line in plain(text).splitlines()) <= 60


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def stage_one(folders):
    data = ["--dataset", folders / "texts.jsonl", "--text-column", "text", "--holdout", 8, "--batch-size", 4]
    return [*data, "--distill-steps", 6, "--device", "cpu"]


def test_ctrl_c_in_stage_one_says_what_was_kept(folders, tmp_path, capsys, monkeypatch):
    real = observer.KernelTrainer.step
    monkeypatch.setattr(observer.KernelTrainer, "step", lambda self, batches, step: interrupt())
    for verb, model in (("convert", "bert"), ("distill", "linear")):
        code, _, err = run(capsys, verb, folders / model, *stage_one(folders), "--output", tmp_path / "out")
        assert code == 130 and "interrupted: nothing was written; --save-every" in err
    assert list(tmp_path.iterdir()) == []
    cut = lambda self, batches, step: interrupt() if step == 4 else real(self, batches, step)  # noqa: E731
    monkeypatch.setattr(observer.KernelTrainer, "step", cut)
    line = ["distill", folders / "linear", *stage_one(folders), "--output", tmp_path / "out", "--save-every", 2]
    code, _, err = run(capsys, *line)
    assert code == 130
    assert f"the state of step 3 is in {tmp_path / 'out'}.stage1; resume with the same line and --resume" in err
    monkeypatch.undo()
    assert run(capsys, *line, "--resume")[0] == 0


def test_ctrl_c_in_stage_two_says_how_to_go_on(folders, tmp_path, capsys, monkeypatch):
    from transformers import Trainer

    from linearize.training.stage_two.tuner import Tuner

    out = tmp_path / "tuned"
    line = ["finetune", folders / "linear", "--task", "text-classification", "--dataset", folders / "texts.jsonl",
            "--columns", "text", "--epochs", 2, "--batch-size", 8, "--max-length", 16, "--device", "cpu", "--output",
            out]  # fmt: skip
    # While the start is measured, and in the first step.
    for place, name, more in ((Tuner, "keep_start", ()), (Trainer, "training_step", ("--resume",))):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, interrupt)
            code, _, err = run(capsys, *line, *more)
        assert code == 130 and "no checkpoint was written yet; resume with the same line and --resume" in err
    real, done = Trainer.training_step, []

    def second_epoch(self, *args, **kwargs):
        done.append(1)
        return interrupt() if self.state.epoch and self.state.epoch >= 1 else real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "training_step", second_epoch)
        code, _, err = run(capsys, *line, "--resume")
    last = last_checkpoint(f"{out}.training")
    assert code == 130 and f"{last.name} is in {out}.training; resume with the same line and --resume" in err
    assert not out.exists()
    assert run(capsys, *line, "--resume")[0] == 0
    assert out.exists() and not last.exists()


def test_ctrl_c_in_the_demo_and_the_upload(folders, tmp_path, capsys, monkeypatch):
    def demo(job, on_event):
        if job.tokens > 512:
            on_event(Saved(tmp_path))
        interrupt()

    monkeypatch.setattr("linearize.jobs.demo.run_demo", demo)
    monkeypatch.setattr("linearize.checkpoint.push.push", interrupt)
    assert "nothing was written" in run(capsys, "demo", "--tokens", 512)[2]
    # It named --max-length, which the demo does not have, after a line about "-1 steps".
    for word, least in (("tokens", 512), ("steps", 0)):
        err = run(capsys, "demo", f"--{word}", -1)[2]
        assert f"options, {word}: got -1, expected a whole number of at least {least}" in err and err.count("\n") == 1
    code, _, err = run(capsys, "demo", "--tokens", 1000, "--output", tmp_path / "made")
    assert code == 130 and f"the converted model is in {tmp_path / 'made'}" in err
    code, _, err = run(capsys, "push", folders / "linear", "alice/linear")
    assert code == 130 and f"continue with: linearize push {folders / 'linear'} alice/linear" in err


def test_ctrl_c_before_the_work_begins(tmp_path, capsys, monkeypatch):
    """It ended in a NameError about `work`; and a run without a folder had "finished stages in" it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("linearize.jobs.recipes.run.run_recipe", interrupt)
    monkeypatch.setattr(_progress.Heartbeat, "_run", lambda self: None)
    assert run(capsys, "run", "pixels-small")[2].strip() == "linearize: interrupted: nothing was written"
    monkeypatch.setattr(_progress.Work, "now", interrupt)
    for line in ("convert bert", "demo"):
        code, _, err = run(capsys, *line.split())
        assert code == 130 and err.strip() == "linearize: interrupted: nothing was written"


def test_ctrl_c_in_reports_leaves_nothing(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("linearize.evaluation.report.inputs.load_inputs", interrupt)
    for verb, names in (("report", ["linear"]), ("compare", ["linear", "linear2"])):
        code, _, err = run(capsys, verb, *[folders / name for name in names], "--output", tmp_path / "out")
        assert code == 130 and "interrupted: nothing was written" in err
    assert list(tmp_path.iterdir()) == []


EVIL = "a\x1b[31mred\x1b]0;title\x07\x9b2J\r\x08\u202etxt\udcff"


def test_a_rounding_error_below_zero_is_no_negative_divergence(capsys):
    """The table said "-0.0000 > -0.0000"."""
    measured = SimpleNamespace(layers={"a": 0.0}, cosine=1.0, logits=-1e-9)
    result = SimpleNamespace(before=measured, after=measured, steps=1, best_step=1)
    console().print(_output.closeness_table(result))
    text = capsys.readouterr().out
    assert "0.0000 > 0.0000" in text and "-0.0000" not in text


def test_names_cannot_steer_the_terminal(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with redirect_stdout(terminal):
        out = console()
        out.print(EVIL)
        out.print(table(EVIL, [EVIL, "[red]b[/red]"], [[EVIL, "[blink]x[/blink]"]]))
    text = plain(re.sub(r"\x1b\[\?25[lh]", "", terminal.getvalue()))
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text.replace("\r\n", "\n"))
    assert text.count("[31mred") == 4 and "[red]b[/red]" in text and "[blink]x[/blink]" in text


def test_errors_cannot_steer_the_terminal(capsys, tmp_path):
    folder = tmp_path / "bad\x1b[2J\x9bname"
    folder.mkdir()
    for line in (["inspect", folder], ["convert", folder], ["kernels", EVIL], ["run", EVIL], [EVIL]):
        code, _, err = run(capsys, *line)
        assert code == 2 and err.count("\n") == 1
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", err)
