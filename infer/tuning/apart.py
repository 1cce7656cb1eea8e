"""The prompts that a choice is measured on are not those that it is made on."""

from infer.tasks import load_prompts
from infer.tuning.config import TuneConfig
from model.errors import UserError


def check_apart(config: TuneConfig) -> None:
    """UserError for a choice that would be measured on a prompt that it is made on."""
    if config.measure is None:
        return
    known = {prompt.text for prompt in load_prompts(config.prompts)}
    seen = next((prompt for prompt in load_prompts(config.measure) if prompt.text in known), None)
    if seen is not None:
        raise UserError(
            f"tune.measure: prompt {seen.prompt_id!r} is one of those that the choice is made on; measure on others"
        )
