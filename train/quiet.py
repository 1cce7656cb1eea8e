"""Only our own lines on the terminal."""

import logging
import os
import warnings


def be_quiet() -> None:
    """No advice and no loading bars of the libraries."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed prints that it found no GPU
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(deepspeed|accelerate|torch)\b")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
