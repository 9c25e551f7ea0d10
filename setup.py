"""The one thing that pyproject.toml cannot say: README.md as a package page can show it.

A package page stands alone, so links to files of the repository lead nowhere there. Where `project.urls` has a
`Source`, they lead to that repository and its pictures show; until then, links become the names of the files, and a
picture its description.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]+)\)")


def package_readme(text: str, source: str | None = None) -> str:
    """Return README.md with no link that is relative.

    Args:
        text: README.md.
        source: the repository's address, as https://HOST/OWNER/NAME; None where there is none.
    """

    def alone(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        if source:
            return f"{picture}[{words}]({source.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{path})"
        if picture:
            return f"*Picture, in the repository as `{path}`: {words}.*"
        return words if words == path else f"{words} (`{path}`)"

    return LINK.sub(alone, text)


if __name__ == "__main__":
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    setup(
        long_description=package_readme(
            (HERE / "README.md").read_text(encoding="utf-8"), project.get("urls", {}).get("Source")
        ),
        long_description_content_type="text/markdown",
    )
