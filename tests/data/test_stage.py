"""Laws of what a stage counts as its inputs, of a job's share, and of the progress bar."""

import io
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data.stage import Share, bar, changed_since, feature_inputs, sampled_digest, state_inputs, target_inputs
from aerie.model.storage import digest
from tests import tiny


def test_weights_taps_and_dtypes_decide_the_states_and_texts_only_the_rows(tmp_path: Path) -> None:
    target = tiny.target(tmp_path / "target")
    tiny.write_conversations(tmp_path / "rows/one.jsonl", 8)

    def inputs(**features: Any) -> dict[str, Any]:
        data = DataConfig(conversations=(str(tmp_path / "rows"),))
        return feature_inputs(TargetConfig(path=str(target)), data, FeaturesConfig(**features))

    before = inputs()
    assert digest(inputs(batch_tokens=64, shuffle_shards=2)) == digest(before)
    for change in ({"after_blocks": (1,)}, {"storage": "int8"}):
        assert digest(state_inputs(inputs(**change))) != digest(state_inputs(before))
    for path in (target / "chat_template.jinja", tmp_path / "rows/one.jsonl", tmp_path / "rows/two.jsonl"):
        earlier = inputs()
        path.write_text((path.read_text() if path.exists() else "") + " ")
        assert digest(inputs()) != digest(earlier) and digest(state_inputs(inputs())) == digest(state_inputs(before))
    weights = target / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert digest(state_inputs(inputs())) != digest(state_inputs(before))


def test_a_change_deep_in_a_large_file_is_seen_without_reading_it_all(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    before = sampled_digest(weights)
    weights.write_bytes(bytes(2 << 20) + b"x" * (1 << 14) + bytes((1 << 20) - (1 << 14)))
    assert sampled_digest(weights) != before
    hub = TargetConfig(path="owner/name", revision="v1")
    assert target_inputs(hub) == {"path": "owner/name", "revision": "v1", "dtype": "auto"}


def test_what_changed_since_a_cache_was_made_is_named_and_what_is_not_here_is_no_change() -> None:
    target = {"path": "here", "files": {"config.json": "a", "tokenizer.json": "b"}, "chat_template": "c"}
    made_of = {"target": target, "conversations": {"one.jsonl": "d"}}
    for changed, conversations, name in (
        ({}, {"one.jsonl": "d"}, None),
        ({"files": {}}, {}, None),  # another machine
        ({"path": "other", "files": {"config.json": "x"}}, {}, None),  # another target is refused elsewhere
        ({}, {"one.jsonl": "d", "new.jsonl": "x"}, "new.jsonl"),
        ({"chat_template": "x"}, {}, "target.chat_template"),
        ({"files": {"config.json": "a", "tokenizer.json": "x"}}, {}, "tokenizer.json"),
    ):
        assert changed_since(made_of, {**target, **changed}, conversations) == name


def test_shares_take_every_item_once_whatever_their_processes() -> None:
    taken = [n for job in (1, 2, 3) for rank in range(job) for n in Share(job, 3).part(20, rank, job)]
    assert sorted(taken) == list(range(20))


def test_a_log_file_gets_whole_lines_and_a_terminal_one_that_is_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for is_terminal, rank, done in ((False, 0, 0), (True, 0, 0), (False, 1, 0)):
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign, misc]
        monkeypatch.setattr(sys, "stderr", stream)
        with bar(1000, "tok", "features", rank, done) as progress:
            time.sleep(0.02)
            for _ in range(10):
                progress.update((1000 - done) // 100)
                progress.refresh()
            progress.update((1000 - done) * 9 // 10)
        shown.append(stream.getvalue())
    log, terminal, silent = shown
    last = log.split("\n")[-2]
    assert "\r" not in log and last.startswith("features: 100% of 1.00k tok, ") and "tok/s" in last
    assert terminal.count("\n") == 1 and "\r" in terminal and silent == ""
