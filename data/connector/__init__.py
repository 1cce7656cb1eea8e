"""The module that a vLLM server of hidden states imports on a CPU, and how it is named."""

from pathlib import Path
from typing import NamedTuple


class Connector(NamedTuple):
    name: str  # of the class
    module: str
    folder: Path  # for PYTHONPATH


CONNECTOR = Connector("CpuStatesConnector", "cpu_states", Path(__file__).resolve().parent)
