"""Every test runs offline and on one thread: results must not depend on the network or on the machine's load."""

import functools
import gc
import os

from support import arithmetic

os.environ.update(arithmetic.unset())
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As the command line sets them; they are read when `datasets` is imported.
os.environ.setdefault("DATASETS_VERBOSITY", "critical")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# The ops in PyTorch are what is tested, whatever was compiled here, unless asked for; tests/native turns the other on.
os.environ.setdefault("LINEARIZE_NATIVE", "0")
# readline, which pytest loads, sets the size of a screen that is not there; tests that want one say so.
os.environ.pop("COLUMNS", None)
os.environ.pop("LINES", None)

import jinja2
import pytest

# Until all is collected, garbage is not searched for.
gc.disable()

pytest_plugins = ["support.sampling", "pytester"]


def pytest_configure(config):
    """Import torch where tests run; what only distributes them to workers starts these the sooner without it."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    torch.set_num_threads(int(os.environ.get("LINEARIZE_TEST_THREADS", "1")))
    for name in ("normal_", "uniform_", "kaiming_uniform_", "xavier_uniform_", "trunc_normal_", "zeros_", "ones_"):
        setattr(torch.nn.init, name, _not_on_meta(getattr(torch.nn.init, name)))
    for device in (torch.cuda, torch.mtia, torch.xpu):
        if not device.is_available():
            # A seed for a device that is not there would write down the whole stack, each time.
            device.manual_seed_all = lambda seed: None
    config.pluginmanager.import_plugin("support.native_op")


def _not_on_meta(fill):
    """Leave weights on the meta device alone: to draw numbers that are not kept takes longer than to build a model."""

    @functools.wraps(fill)
    def filled(tensor, *args, **options):
        return tensor if tensor.is_meta else fill(tensor, *args, **options)

    return filled


def pytest_collection_modifyitems(items):
    """Put tests that fork first, so that one worker runs them: each starts a process to fork, which takes seconds."""
    from support import forks

    def forking(module):
        used = vars(module).values()
        return any(x is forks or x is forks.context or getattr(x, "__module__", "") == forks.__name__ for x in used)

    items.sort(key=lambda item: not forking(item.module))


def pytest_collection_finish():
    """Leave what was imported and collected out of later searches for garbage: each trainer starts a full one."""
    from support import forks

    gc.enable()
    gc.collect()
    forks.settle()
    # Each trainer starts a search of everything; what is young is most of what it would find.
    full = gc.collect
    gc.collect = lambda generation=1: full(generation)


@pytest.fixture(autouse=True, scope="session")
def few_resamples():
    """Intervals of 200 resamples in place of 10,000, which take longer than to train a tiny model."""
    from linearize.training.stage_two.intervals import resampled_metrics

    resampled_metrics.__kwdefaults__["resamples"] = 200


@pytest.fixture(autouse=True, scope="session")
def cards_compiled_once():
    """The template of model cards, which each save compiles anew, in longer than it takes to write a tiny model."""
    jinja2.Environment.compile = functools.cache(jinja2.Environment.compile)


@pytest.fixture(autouse=True, scope="session")
def little_prose():
    """The built-in text from a tenth of its modules, because to parse all takes longer than most tests; returns all."""
    from linearize.data import builtin

    modules = builtin.MODULES
    builtin.MODULES = " ".join(modules.split()[::10])
    return modules


@pytest.fixture(autouse=True, scope="session")
def small_probes():
    """The product whose time says how quiet the machine is: a thousandth of its usual work, as it is timed often."""
    from linearize.evaluation.bench import meter

    meter.PROBE = 64
