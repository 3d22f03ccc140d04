"""Prints the lowest versions that pyproject.toml allows, as constraints for pip."""

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:>=|==)([0-9.]+)(?:,<[0-9.]+)?")


def constraint(requirement: str) -> str:
    """'name>=1.2,<2' -> 'name==1.2'."""
    match = BOUND.fullmatch(requirement)
    if match is None:
        sys.exit(f"error: pyproject.toml asks for {requirement!r}: write 'name>=lowest'.")
    return "{}=={}".format(*match.groups())


if __name__ == "__main__":
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text())["project"]
    requirements = chain(project["dependencies"], *project["optional-dependencies"].values())
    sys.stdout.writelines(f"{line}\n" for line in sorted(set(map(constraint, requirements))))
