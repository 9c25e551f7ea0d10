"""The verbs that train and measure models: what each is called, takes and runs."""

from __future__ import annotations

import argparse

from linearize.cli._options import Groups, Verb
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob, SearchJob
from linearize.jobs.task_config import EvaluateJob, LongdocJob, TuneJob


class Convert(Verb):
    """Convert a checkpoint: replace softmax by kernels, teach them to imitate it, save an ordinary HuggingFace model.

    examples:
      linearize convert roberta-base --kernel hedgehog --max-length 4096
      linearize convert ./my-bert --kernel flexformer_n --dataset reviews.jsonl.gz --text-column text --seed 1
      linearize convert gpt2 --kernel hedgehog --kernel-arg activation=exp --keep-softmax 0,11
      linearize convert mistralai/Mistral-7B-v0.1 --local-as-full     # its sliding windows are left out
      linearize convert ./SmolLM2-135M-Instruct.Q4_1.gguf --preset causal
      linearize convert ./my-llava --example-inputs one-batch.safetensors
      linearize convert google/vit-base-patch16-224 --dataset ./photos --output vit-linear
      linearize convert google/vit-base-patch16-224 --image-size 384
      linearize convert roberta-base --save-every 200        # and after a crash the same line with --resume
      linearize convert roberta-base --align-steps 1000      # a longer alignment; 0 skips it
      linearize convert roberta-base --dry-run               # the plan, and what it would cost: time, memory, room
      linearize convert roberta-base --kernel auto --budget softmax=1 --plan-out plan.yaml   # the best kernel per layer
      linearize convert roberta-base --plan plan.yaml        # that plan again, perhaps edited
      linearize convert roberta-base --config mine.yaml --distill-steps 500    # a file of options, some of them changed

    Without --dataset, text models learn from a data set on the Hub or, offline, from the prose inside Python, and
    vision models from a data set on the Hub or from two sample photographs. The choice is printed.
    """

    summary = "convert a checkpoint: plan, distil, save"
    module = "train"
    job = ConvertJob
    flags = ("--dry-run", "--no-native", "--explain-backend", "--json")

    @staticmethod
    def declare(parser: argparse.ArgumentParser, groups: Groups) -> None:
        """Declare what follows the conversion."""
        add = parser.add_argument
        add("--push-to-hub", metavar="USER/NAME", help="then upload the result")
        add("--private", action="store_true", help="make a new repository on the Hub private")


class Search(Verb):
    """Choose the kernel of every layer by how close each candidate comes and what it costs.

    examples:
      linearize search roberta-base --plan-out plan.yaml              # as fast as hedgehog everywhere, and closer
      linearize search roberta-base --budget cost=0.25 --length 8192  # a quarter of softmax's time at 8,192 tokens
      linearize search roberta-base --budget softmax=1,time=30m       # one layer may stay softmax; half an hour
      linearize search gpt2 --candidates hedgehog,hedgehog:window=32,flexformer_n:frequencies=32
      linearize convert roberta-base --plan plan.yaml                 # carry a plan out, perhaps edited
      linearize convert roberta-base --kernel auto                    # search and convert in one

    Candidates of all layers learn in one pass of the frozen model: all of them some steps, the better half of each
    layer twice as many, and so on. Costs are measured here, next to softmax, and remembered in the cache folder. Then
    the best plans within the budget, and each kernel in every layer, are tried on the whole model on held-out data, as
    errors of single layers misrank. A window among the candidates is tried without its kernel too. Ctrl-C keeps the
    best plan so far; --save-every N keeps states for --resume.
    """

    summary = "choose the kernel of every layer under a budget"
    module = "train"
    job = SearchJob
    flags = ("--no-native", "--json")


class Distill(Verb):
    """Continue stage one on a converted checkpoint: more steps, other data, longer rows.

    examples:
      linearize distill ./roberta-base-hedgehog --dataset reviews.jsonl --distill-steps 2000
      linearize distill ./bert-luna --distill-length 4096 --query-sample 256 --batch-size 2 --output bert-luna-long
      linearize distill ./bert-luna --feed student --loss output --distill-steps 300
      linearize distill ./bert-luna --distill-length 4096 --dry-run                # what it would cost, nothing written

    For a model that is not converted yet, `linearize convert MODEL` does the same after converting it.

    several processes or machines, for this verb and `convert` (--batch-size is per process):
      accelerate config                                                # once: how many processes, on which devices
      accelerate launch --no_python linearize distill ./roberta-base-hedgehog --dataset reviews.jsonl
      accelerate launch --config_file fsdp.yaml --no_python linearize distill ./big-model-hedgehog --precision bf16
      ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 --no-python linearize distill ./bert-luna        # on CPUs
    Every process has all kernels and its share of the rows; gradients are added up. Under FSDP the frozen model is
    spread over the devices and gathered layer by layer; each process first loads it into its host's memory. fsdp.yaml:
      compute_environment: LOCAL_MACHINE
      distributed_type: FSDP
      fsdp_config: {fsdp_version: 2}
      num_machines: 1
      num_processes: 8
    FSDP 1 is refused: it cannot leave the kernels out. accelerate starts FSDP on GPUs only; the spreading itself is
    tested on two CPU processes. `align` and `finetune` do not run under FSDP. DeepSpeed is not tested: its processes
    share the rows, but no weights are spread. If one device is too small: --query-sample, --precision bf16, a smaller
    --batch-size.
    """

    summary = "continue the distillation of a converted checkpoint"
    module = "train"
    job = DistillJob
    flags = ("--dry-run", "--json")


class Align(Verb):
    """Align a converted checkpoint with its original: hidden states, pooled output and logits, on unlabelled data.

    examples:
      linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --text-column text
      linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --save-every 200  # after a crash with --resume
      linearize align ./bert-cola-hedgehog --teacher ./bert-cola --dataset cola.jsonl.gz              # a tuned original
      linearize align ./bert-hedgehog --dataset mrpc.jsonl.gz --text-column sentence1,sentence2
      linearize align ./vit-hedgehog --dataset ./photos --train kernels
      linearize align ./roberta-base-hedgehog --config mine.yaml --steps 2000  # options from a file
      linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --dry-run  # what it would cost

    First each block learns to return what the original's block returns on the original's inputs (--blockwise), then the
    whole model learns. The teacher is the checkpoint's own softmax as long as its weights are the original's; otherwise
    name it with --teacher. Labels are not used. `linearize convert` aligns automatically after stage one.
    """

    summary = "bring a converted checkpoint as a whole close to its original"
    module = "train"
    job = AlignJob
    flags = ("--dry-run", "--json")


class Finetune(Verb):
    """Tune a converted (or any) checkpoint on a task and save the result; the best measured weights are kept.

    examples:
      linearize finetune bert-hedgehog --task cola --output bert-cola
      linearize finetune bert-hedgehog --task text-classification --dataset a.jsonl --columns review --label-column mood
      linearize finetune gpt2-hedgehog --task causal-lm --dataset wiki.txt --max-length 1024 --lora r=8,alpha=16
      linearize finetune bert-hedgehog --task cola --lora r=8 --keep-adapter --output bert-cola   # also for peft
      linearize finetune llama-hedgehog --task chat --dataset chats.jsonl --max-length 4096       # column `messages`
      linearize finetune bert-hedgehog --task cola --output bert-cola --resume
      linearize finetune bert-base --task mrpc --output bert-mrpc                     # the teacher: the original, tuned
      linearize finetune bert-hedgehog --task mrpc --teacher bert-mrpc --extra-pairs 1 --epochs 10
      linearize finetune bert-hedgehog --task cola --config mine.yaml --epochs 10                # options from a file
      linearize finetune bert-hedgehog --task cola --dry-run                                     # what it would cost
      torchrun --nproc_per_node 4 --no-python linearize finetune bert-hedgehog --task sst2                # on four GPUs

    Several processes share the rows, and one of them writes.

    With a teacher the model follows the hidden states of every layer and the logits of the tuned original, and the
    labels join half-way. The kept state is chosen on rows held out of the training rows, never on the reported ones.
    --extra-pairs 1 adds a new pair of the task's texts per training row, without a label, for the teacher alone.

    Low-rank updates (--lora) are merged into the saved weights. --keep-adapter also saves them separately, with kernels
    and head, in OUTPUT/adapter: peft.PeftModel.from_pretrained(MODEL, "OUTPUT/adapter") puts them on the model that was
    tuned, loaded with the head of the task.
    """

    summary = "tune a checkpoint on a task"
    module = "train"
    job = TuneJob
    flags = ("--dry-run", "--json")


class Evaluate(Verb):
    """Measure a checkpoint on a task; with --compare also its original, at its own length and in chunks.

    examples:
      linearize evaluate bert-cola-linear --task cola --compare bert-cola
      linearize evaluate bert-long --task text-classification --dataset reviews.jsonl --compare bert-tuned --memory
      linearize evaluate gpt2-hedgehog --task causal-lm --dataset wiki.txt --max-length 1024 --stride 512 --compare gpt2
      linearize evaluate gpt2-window --task causal-lm --dataset wiki.txt --ablate kernel,window
      linearize evaluate vit-linear --task image-classification --dataset ./photos --json

    Each side reads as many tokens of a row as it takes (or was tuned with). Rows that the original has to cut are also
    read as chunks of that length, whose logits (of `similarity`: embeddings) are averaged. Differences are taken on the
    same rows, with a paired bootstrap interval; if 0 is in it, the difference is within the noise.
    """

    summary = "measure a checkpoint on a task, and its original"
    module = "evaluate"
    job = EvaluateJob


class Longdoc(Verb):
    """Long documents from end to end: tune a model, convert it for longer inputs, tune that alike, and compare them.

    examples:
      linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192
      linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --quick      # a taste
      linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192 --dry-run
      linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192 --resume
      linearize longdoc ./my-bert --task text-classification --dataset cases.jsonl --max-length 4096 --align-length 2048
      linearize longdoc ./my-bert --task text-classification --dataset a.jsonl --preset encoder --positions interpolate
      linearize longdoc roberta-base --task text-regression --dataset ./essays --max-length 2048 --chunk-length 256

    The original is tuned at its own length (512, say), cut there. It is then converted for --max-length tokens, aligned
    on long rows, where positions after its old end are learned, and tuned with the same options on whole documents.
    Both are measured on the same rows: the original cut, the original in chunks whose logits are averaged, the linear
    model cut alike, the linear model on whole documents. The output holds original/, linear/, results.json, and
    times.json with all that depends on the machine. Ctrl-C loses nothing: the same line and --resume continue at the
    step.
    """

    summary = "long documents from end to end: convert, tune, compare with the original and its chunks"
    module = "evaluate"
    job = LongdocJob
    flags = ("--dry-run", "--json")
