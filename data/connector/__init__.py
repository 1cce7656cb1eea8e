"""Names the module that a vLLM server on a CPU imports to write hidden states."""

from pathlib import Path
from typing import NamedTuple


class Connector(NamedTuple):
    name: str  # of the class in the module
    module: str
    folder: Path  # of the module, for PYTHONPATH


CONNECTOR = Connector("CpuStatesConnector", "cpu_states", Path(__file__).resolve().parent)
