"""The files of a head's directory, told without torch: where the weights are, and digests of what decides the head."""

from pathlib import Path

from model.files import file_digest

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
CALIBRATOR = "calibrator.json"  # what its confidence stood for on held-out prompts; decides nothing about the head
MULTI_TOKEN = ("medusa_lm_head.pt", "hydra_lm_head.pt")  # as Medusa and Hydra publish theirs
ORDER = (  # the first that is there is read
    WEIGHTS,
    f"{WEIGHTS}.index.json",
    PICKLE,
    f"{PICKLE}.index.json",
    *MULTI_TOKEN,
)


def find_weights(directory: Path) -> Path | None:
    """The file that holds a directory's tensors or lists its shards; None where there is none."""
    return next((directory / name for name in ORDER if (directory / name).is_file()), None)


def digests(directory: Path) -> dict[str, str]:
    """File name -> digest of everything that decides a head."""
    names = (CONFIG, "*.safetensors", "*.bin", *MULTI_TOKEN)
    return {path.name: file_digest(path) for pattern in names for path in sorted(directory.glob(pattern))}
