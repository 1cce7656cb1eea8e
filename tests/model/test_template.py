"""Chat templates in files are found from anywhere."""

from pathlib import Path

import pytest

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.model.storage import SHIPPED_TEMPLATE as SHIPPED
from aerie.model.storage import template_path
from aerie.model.target import load_tokenizer, read_template
from tests import tiny


def test_the_shipped_template_is_found_from_any_directory_and_an_own_file_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.tokenizer(chat_template=None).save_pretrained(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    config = TargetConfig(path=str(tmp_path / "target"), chat_template=SHIPPED)
    shipped = load_tokenizer(config).chat_template
    assert "USER: " in shipped and "ASSISTANT:" in shipped
    own = tmp_path / SHIPPED
    own.parent.mkdir(parents=True)
    own.write_text("mine", encoding="utf-8")
    assert template_path(SHIPPED).samefile(own) and read_template(SHIPPED) == "mine"


def test_a_missing_or_unreadable_template_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.chat_template: nowhere\.jinja: no such file.*vicuna"):
        read_template("nowhere.jinja")
    (tmp_path / "bad.jinja").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"bad\.jinja: cannot read the chat template"):
        read_template(str(tmp_path / "bad.jinja"))
