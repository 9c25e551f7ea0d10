"""The verbs that train and measure models: names, options, help and implementation."""

from __future__ import annotations

from linearize.cli._options import Verb, argument, switch
from linearize.jobs.config import AlignJob, ConvertJob, DistillJob, SearchJob
from linearize.jobs.task_config import EvaluateJob, LongdocJob, TuneJob

DEVICE_MEMORY = (
    "with --dry-run: count the memory that each stage needs on a device of this size, such as 80GB, from the model's "
    "config alone, instead of timing steps"
)


class Convert(Verb):
    """Convert a checkpoint: replace softmax by kernels, train them to imitate it, save an ordinary HuggingFace model.

    examples:
      linearize convert roberta-base --kernel hedgehog --max-length 4096
      linearize convert ./my-bert --kernel flexformer_n --dataset reviews.jsonl.gz --text-column text --seed 1
      linearize convert gpt2 --kernel hedgehog --kernel-arg activation=exp --keep-softmax 0,11
      linearize convert mistralai/Mistral-7B-v0.1 --local-as-full     # without its sliding windows
      linearize convert ./SmolLM2-135M-Instruct.Q4_1.gguf --preset causal
      linearize convert ./my-llava --example-inputs one-batch.safetensors
      linearize convert google/vit-base-patch16-224 --dataset ./photos --output vit-linear
      linearize convert google/vit-base-patch16-224 --image-size 384
      linearize convert roberta-base --save-every 200        # after a crash, run the same line with --resume
      linearize convert roberta-base --align-steps 1000      # a longer alignment; 0 skips it
      linearize convert roberta-base --dry-run               # the plan and its cost: time, memory, disk space
      linearize convert ./llama-70b --dry-run --devices 8 --device-memory 80GB     # which stages fit, from config.json
      linearize convert ./llama-70b --stream-blocks          # stage one with one block in memory at a time
      linearize convert roberta-base --kernel auto --budget softmax=1 --plan-out plan.yaml   # the best kernel per layer
      linearize convert roberta-base --plan plan.yaml        # with that plan, which may be edited
      linearize convert roberta-base --config mine.yaml --distill-steps 500    # options from a file, one overridden

    Without --dataset, text models are trained on a data set from the Hub or, offline, on the prose in Python's
    documentation, and vision models on a data set from the Hub or on two sample photographs. The choice is printed.
    """

    summary = "convert a checkpoint: plan, distil, save"
    module = "train"
    job = ConvertJob
    flags = ("--dry-run", "--no-native", "--explain-backend", "--json")
    arguments = (
        argument("--device-memory", metavar="SIZE", help=DEVICE_MEMORY),
        argument("--devices", type=int, default=1, metavar="N", help="how many such devices there are (1)"),
        argument("--push-to-hub", metavar="USER/NAME", help="upload the result after the conversion"),
        switch("--private", "make a new repository on the Hub private"),
    )


class Search(Verb):
    """Choose a kernel for every layer, by each candidate's closeness to softmax and its cost.

    examples:
      linearize search roberta-base --plan-out plan.yaml              # as fast as hedgehog everywhere, and closer
      linearize search roberta-base --budget cost=0.25 --length 8192  # a quarter of softmax's time at 8,192 tokens
      linearize search roberta-base --budget softmax=1                # one layer may stay softmax
      linearize search gpt2 --candidates hedgehog,hedgehog:window=32,flexformer_n:frequencies=32
      linearize convert roberta-base --plan plan.yaml                 # carry out a plan, which may be edited
      linearize convert roberta-base --kernel auto                    # search and convert in one step

    The candidates of all layers are trained in one pass of the frozen model. Costs are measured on this machine
    relative to softmax, and cached. Then the best plans within the budget, and each kernel in every layer, are tried on
    the whole model on held-out data, because errors of single layers misrank plans. A candidate with a window is also
    tried without its kernel. --save-every N keeps states for --resume.
    """

    summary = "choose the kernel of every layer under a budget"
    module = "train"
    job = SearchJob
    flags = ("--no-native", "--json")


class Distill(Verb):
    """Continue stage one on a converted checkpoint: more steps, other data, longer rows.

    examples:
      linearize distill ./bert-luna --dataset reviews.jsonl --distill-steps 2000
      linearize distill ./bert-luna --distill-length 4096 --query-sample 256 --batch-size 2 --output bert-luna-long
      linearize distill ./bert-luna --feed student --loss output --distill-steps 300
      linearize distill ./bert-luna --distill-length 4096 --dry-run                # estimate the cost, write nothing

    For a model that is not converted yet, `linearize convert MODEL` does the same after converting it, and then aligns
    it. A checkpoint whose blocks were aligned is refused, because its own softmax, which stage one imitates, is no
    longer the original's: convert with --align-steps 0 to continue stage one later.

    several processes or machines, for this verb and `convert` (--batch-size is per process):
      accelerate config                                                # once: number of processes, and devices
      accelerate launch --no_python linearize distill ./bert-luna --dataset reviews.jsonl
      accelerate launch --config_file fsdp.yaml --no_python linearize distill ./big-model-hedgehog --precision bf16
      ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 --no-python linearize distill ./bert-luna        # on CPUs
    Every process has all kernels and its share of the rows; gradients are summed. Under FSDP the frozen model is
    sharded over the devices and gathered layer by layer; each process reads only its parts of it. fsdp.yaml:
      compute_environment: LOCAL_MACHINE
      distributed_type: FSDP
      fsdp_config: {fsdp_version: 2}
      num_machines: 1
      num_processes: 8
    FSDP 1 is refused: it cannot exclude the kernels. accelerate starts FSDP only on GPUs; the sharding itself is tested
    on two CPU processes. `align` and `finetune` run under FSDP 2 too. DeepSpeed is refused. If one device is too small,
    try --query-sample, --precision bf16, or a smaller --batch-size.
    """

    summary = "continue the distillation of a converted checkpoint"
    module = "train"
    job = DistillJob
    flags = ("--dry-run", "--json")


class Align(Verb):
    """Align a converted checkpoint with its original: hidden states, pooled output and logits, on unlabelled data.

    examples:
      linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --text-column text
      linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --save-every 200  # after a crash add --resume
      linearize align ./bert-cola-hedgehog --teacher ./bert-cola --dataset cola.jsonl.gz              # a tuned original
      linearize align ./bert-hedgehog --dataset mrpc.jsonl.gz --text-column sentence1,sentence2
      linearize align ./vit-hedgehog --dataset ./photos --train kernels
      linearize align ./roberta-base-hedgehog --config mine.yaml --steps 2000  # options from a file
      linearize align ./roberta-base-hedgehog --dataset reviews.jsonl --dry-run  # estimate the cost

    First each block is trained to match the original's block on the original's inputs (--blockwise), then the whole
    model is trained. The teacher is the checkpoint's own softmax as long as its weights are the original's; otherwise
    name it with --teacher. Labels are not used. `linearize convert` aligns automatically after stage one.
    """

    summary = "train a converted checkpoint as a whole to match its original"
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
      linearize finetune bert-base --task mrpc --output bert-mrpc                     # tune the original, as a teacher
      linearize finetune bert-hedgehog --task mrpc --teacher bert-mrpc --extra-pairs 1 --epochs 10
      linearize finetune bert-hedgehog --task cola --config mine.yaml --epochs 10                # options from a file
      linearize finetune bert-hedgehog --task cola --dry-run                                     # estimate the cost
      torchrun --nproc_per_node 4 --no-python linearize finetune bert-hedgehog --task sst2                # on four GPUs

    Several processes share the rows, and one of them writes. Under FSDP 2 they also share the weights.

    With a teacher, the model imitates the tuned original's hidden states in every layer and its logits; the labels are
    added half-way. The state to keep is chosen on rows held out of the training rows, never on the reported ones.
    --extra-pairs 1 adds a new pair of the task's texts per training row, unlabelled and used only with the teacher.

    Low-rank updates (--lora) are merged into the saved weights. --keep-adapter also saves them separately, with kernels
    and head, in OUTPUT/adapter: peft.PeftModel.from_pretrained(MODEL, "OUTPUT/adapter") applies them to the model that
    was tuned, loaded with the task's head.
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

    Each side reads as many tokens of a row as it takes (or was tuned with). Rows that the original must cut are also
    read in chunks of that length, whose logits (for `similarity`: embeddings) are averaged. Differences are computed on
    the same rows, with a paired bootstrap interval; if it contains 0, the difference is within the noise.
    """

    summary = "measure a checkpoint on a task, and its original"
    module = "evaluate"
    job = EvaluateJob


class Longdoc(Verb):
    """Long documents from end to end: tune a model, convert it for longer inputs, tune the result, and compare both.

    examples:
      linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192
      linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --quick      # a quick look
      linearize longdoc bert-base-uncased --task text-classification --dataset ./reviews --max-length 8192 --resume
      linearize longdoc ./my-bert --task text-classification --dataset cases.jsonl --max-length 4096 --align-length 2048
      linearize longdoc ./my-bert --task text-classification --dataset a.jsonl --preset encoder --positions interpolate
      linearize longdoc roberta-base --task text-regression --dataset ./essays --max-length 2048 --chunk-length 256

    The original is tuned at its own length (512, say) on truncated documents. It is then converted for --max-length
    tokens, aligned on long rows, which trains its new positions, and tuned with the same options on whole documents.
    Both are measured on the same rows: the original on truncated documents, the original in chunks whose logits are
    averaged, the linear model on the same truncated documents, and the linear model on whole documents. The output has
    original/, linear/, results.json, and times.json with everything that depends on the machine. Ctrl-C loses nothing:
    run the same line with --resume to continue.
    """

    summary = "long documents from end to end: convert, tune, compare with the original and its chunks"
    module = "evaluate"
    job = LongdocJob
