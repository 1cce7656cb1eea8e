"""What leaves the machine: no path of it, no home, no name of whose it is; addresses and names of the Hub stay."""

from typing import Any

import pytest

from aerie.model.card import is_local_source, public, public_names


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/home/alice/data/train.jsonl", "train.jsonl"),
        ("/home/alice/my data/train.jsonl", "train.jsonl"),
        ("--run=/home/alice/my runs/x", "--run=x"),
        ("[/home/alice/a.jsonl,/srv/alice/b.jsonl]", "[a.jsonl,b.jsonl]"),
        ("/home/alice", "home"),
        ("/Users/alice/", "home"),
        ("/export/home/alice", "home"),
        ("~", "home"),
        ("~/x.yaml", "x.yaml"),
        ("../../alice/x.yaml", "x.yaml"),
        ("file:///home/alice/x.yaml", "x.yaml"),
        ("nas:/home/alice/x.yaml", "nas:x.yaml"),
        ("C:\\Users\\alice\\x.yaml", "x.yaml"),
        ("\\\\nas\\alice\\x.yaml", "x.yaml"),
        ("read /home/alice/x.yaml and ~/y.yaml", "read x.yaml and y.yaml"),
    ],
)
def test_a_path_of_the_machine_gives_way_to_its_last_part(text: str, told: str) -> None:
    assert public(text, {}) == told
    assert public({text: [{"key": text}]}, {}) == {told: [{"key": told}]}


@pytest.mark.parametrize(
    "text",
    [
        "https://huggingface.co/a/b",
        "meta-llama/Llama-3.1-8B",
        "4.2 tok/s",
        "and/or",
        "a / b",
        "configs/embedded.yaml",
        "1/2",
    ],
)
def test_what_is_no_path_of_the_machine_stays(text: str) -> None:
    assert public(text, {}) == text


def test_numbers_and_keys_that_are_no_text_stay() -> None:
    value: dict[Any, Any] = {1: 2.5, "a": None, "b": [True, "c"]}
    assert public(value, {}) == value


def test_target_conversations_and_run_are_called_by_their_public_names() -> None:
    recipe = {
        "run": "runs/mine",
        "target": {"path": "runs/mine/target"},
        "data": {"conversations": ["runs/mine/train.jsonl", "HuggingFaceH4/ultrachat_200k", "/data/more.parquet"]},
    }
    names = public_names("meta/Llama", {"recipe.yaml": recipe})
    assert public(recipe, names) == {
        "run": "mine",
        "target": {"path": "meta/Llama"},
        "data": {"conversations": ["train.jsonl", "HuggingFaceH4/ultrachat_200k", "more.parquet"]},
    }
    argv = [
        "main.py",
        "--run",
        "runs/mine",
        "--target.path=runs/mine/target",
        "--data.conversations=[runs/mine/train.jsonl]",
    ]
    told = ["main.py", "--run", "mine", "--target.path=meta/Llama", "--data.conversations=[train.jsonl]"]
    assert public(argv, names) == told
    assert public("runs/mine/heads/eagle3", names) == "mine/heads/eagle3"
    assert public("runs/mine2/heads", names) == "runs/mine2/heads"


def test_a_target_of_the_hub_keeps_the_name_that_the_records_give_it() -> None:
    config = {"aerie": {"target_path": "meta-llama/Llama-3.1-8B"}}
    assert public(config, public_names("someone/else", {"config.json": config})) == config


@pytest.mark.parametrize(
    ("name", "local"),
    [
        ("a/b", False),
        ("a/b:main:train", False),
        ("a/b.jsonl", True),
        ("x.jsonl", True),
        ("tests/model", True),
        ("/a/b", True),
    ],
)
def test_conversations_are_files_or_data_sets(name: str, local: bool) -> None:
    assert is_local_source(name) == local
