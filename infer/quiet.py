"""A command's own words on the terminal, and nobody else's."""


def prepare(threads: int | None) -> None:
    """Threads as the recipe says (null: torch's choice), and no chatter from the libraries."""
    import logging
    import warnings

    import torch
    import transformers

    if threads is not None:
        torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("torch").setLevel(logging.ERROR)
