"""For vision models: convert a vision transformer from timm in Python, distil it, save it, and use it on a picture.

    python examples/images.py vit_tiny_patch16_224
    python examples/images.py vit_tiny_patch16_224 --dataset ./photos --picture cat.jpg --distill-steps 1000

Without a data set the kernels are trained on crops of scikit-learn's two sample photographs. Needs linearize[vision].
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from linearize.checkpoint.provenance import STAGE_ONE, log_file
from linearize.data import DataConfig, load_source
from linearize.training.stage_one.config import DistillConfig
from linearize.training.stage_one.loop import distill

if TYPE_CHECKING:
    from PIL.Image import Image


def main(argv: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Run the example and return the pipeline's predictions for the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name of a timm model")
    parser.add_argument("--dataset")
    parser.add_argument("--picture")
    parser.add_argument("--distill-steps", type=int, default=200)
    parser.add_argument("--untrained", action="store_true", help="do not load pretrained weights")
    parser.add_argument("--output", default="images")
    args = parser.parse_args(argv)

    import timm
    from transformers import AutoImageProcessor, pipeline

    import linearize

    # A bare timm model is returned inside a transformers wrapper.
    bare: Any = timm.create_model(args.model, pretrained=not args.untrained)
    model = linearize.convert(bare, "hedgehog")
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        processor = AutoImageProcessor.from_pretrained(folder)
    source = load_source(DataConfig(dataset=args.dataset, batch_size=8, holdout=16), processor, "image")
    result = distill(model, source, DistillConfig(steps=args.distill_steps))
    print(f"output error {result.before.mean('output_error'):.3f} > {result.after.mean('output_error'):.3f}")
    log = log_file(STAGE_ONE, result.history)
    linearize.save(model, args.output, processor=processor, overwrite=True, extra_files=log)

    classify = pipeline("image-classification", model=args.output, device="cpu")
    answers: list[dict[str, object]] = classify(args.picture or sample(), top_k=3)
    print(answers)
    return answers


def sample() -> Image:
    """Return one of scikit-learn's photographs."""
    from PIL import Image
    from sklearn.datasets import load_sample_image

    return Image.fromarray(load_sample_image("flower.jpg"))


if __name__ == "__main__":
    main()
