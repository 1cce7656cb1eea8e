"""The names under which data sets keep conversations (shapes.yaml)."""

from pathlib import Path
from typing import Any

from aerie.configs.read import read_yaml

Message = dict[str, Any]  # role (user, assistant, system or tool), content, maybe others

SHAPES = read_yaml(Path(__file__).with_name("shapes.yaml"))[0]
