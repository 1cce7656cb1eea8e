"""Chat templates in files, for targets whose tokenizer brings none."""

from pathlib import Path

from model.errors import UserError

SHIPPED = "data/templates/vicuna.jinja"
CHECKOUT = Path(__file__).resolve().parent.parent


def template_path(path: str) -> Path:
    """The file that target.chat_template names: relative paths count from the working directory, then the checkout."""
    for place in (Path(path).expanduser(), CHECKOUT / path):
        if place.is_file():
            return place
    raise UserError(f"target.chat_template: {path}: no such file; a template for Vicuna ships as {SHIPPED}")


def read_template(path: str) -> str:
    """The chat template in a .jinja file, found as template_path does."""
    try:
        return template_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"target.chat_template: {path}: cannot read the chat template: {error}") from error
