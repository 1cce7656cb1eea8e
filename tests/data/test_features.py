"""Laws of the extraction: the cache is the target's own states, whatever the batches, interruptions and processes."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from torch import Tensor

from aerie.configs.errors import UserError
from aerie.configs.schema.data import DataConfig, FeaturesConfig
from aerie.configs.schema.target_and_head import Eagle1Section, TargetConfig
from aerie.data.cache import FILE, FeatureCache
from aerie.data.chat import Row
from aerie.data.features import CachePlan, Sitting, batches, extract, require_own_shards
from aerie.data.tokens import Share as JobShare
from aerie.data.tokens import TokenisedData
from aerie.model.storage import Stage
from aerie.model.target import Target
from tests.data import caches

DATA = TokenisedData(train=caches.rows(14), held_out=caches.rows(3, seed=1))
ROWS: list[Row] = [*DATA.train, *DATA.held_out]
TAPS = (0, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    return caches.load_target(tmp_path_factory.mktemp("target"))


def direct(target: Target, row: Row) -> tuple[Tensor, Tensor]:
    """last_hidden [T, D] and taps [T, 2D] of transformers' own forward of the row alone."""
    with torch.inference_mode():
        output = target.model(input_ids=torch.tensor([row.input_ids]), output_hidden_states=True)
    return output.hidden_states[-1][0], torch.cat([output.hidden_states[k][0] for k in TAPS], dim=-1)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def run(target: Target, plan: CachePlan, **options: Any) -> None:
    extract(target, plan, PartialState(), {}, **options)


def test_the_cache_holds_the_states_of_a_direct_forward(target: Target, tmp_path: Path) -> None:
    cache = caches.cache(tmp_path, target, DATA, after_blocks=TAPS, batch_tokens=1)  # one row a batch: no padding
    for row, found in zip(ROWS, cache, strict=True):
        last_hidden, taps = direct(target, row)
        assert found.taps is not None
        torch.testing.assert_close(found.last_hidden, last_hidden, atol=1e-6, rtol=0)
        torch.testing.assert_close(found.taps, taps, atol=1e-6, rtol=0)


def test_padding_and_batch_composition_do_not_move_the_states(target: Target, tmp_path: Path) -> None:
    alone = caches.cache(tmp_path / "alone", target, DATA, batch_tokens=1)
    for batch_tokens, shard_tokens in ((100, 120), (4096, 100_000)):
        together = caches.cache(
            tmp_path / str(batch_tokens), target, DATA, batch_tokens=batch_tokens, shard_tokens=shard_tokens
        )
        error = max((a.last_hidden - b.last_hidden).abs().max().item() for a, b in zip(alone, together, strict=True))
        assert error < 1e-5


def test_batches_stay_within_their_tokens_and_take_every_row_once() -> None:
    chance = random.Random(0)  # noqa: S311
    lengths = [chance.randint(1, 90) for _ in range(300)]
    groups = batches(lengths, 256)
    assert sorted(place for group in groups for place in group) == list(range(300))
    assert all(len(group) * max(lengths[place] for place in group) <= 256 for group in groups)
    assert len(groups) < 1.2 * sum(lengths) / 256  # little padding
    assert batches([300, 300], 256) == [[0], [1]]


def test_a_deleted_and_a_truncated_shard_are_made_again_and_the_others_kept(target: Target, tmp_path: Path) -> None:
    plan = caches.plan(tmp_path, target, DATA)
    run(target, plan)
    before, kept = contents(tmp_path), plan.path_of(0).stat().st_mtime_ns
    assert len(plan.shards) >= 3
    plan.path_of(1).unlink()
    plan.path_of(2).write_bytes(plan.path_of(2).read_bytes()[:-4])
    with pytest.raises(UserError, match=r"shard-00001\.safetensors is missing"):
        FeatureCache.open(tmp_path)
    run(target, plan)
    assert contents(tmp_path) == before
    assert plan.path_of(0).stat().st_mtime_ns == kept


def test_an_interrupted_extraction_leaves_whole_shards_only_and_goes_on(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = TokenisedData(caches.rows(60), DATA.held_out)
    plan, forwards = caches.plan(tmp_path / "cut", target, many), Target.features

    def interrupted(self: Target, ids: Tensor, *rest: object) -> object:
        if plan.state_of(1) == "whole":  # written by a thread, while later shards are computed
            raise KeyboardInterrupt
        return forwards(self, ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(target, plan)
    monkeypatch.undo()
    left = contents(plan.directory)
    assert 2 <= len(left) < len(plan.shards) and FILE not in left  # the third may have been under way
    assert [plan.state_of(shard, thorough=True) for shard in range(len(left))] == ["whole"] * len(left)
    (plan.directory / ".shard-00002.safetensors.1.tmp").write_bytes(b"left by a killed process")
    run(target, plan)
    uncut = caches.plan(tmp_path / "uncut", target, many)
    run(target, uncut)
    assert contents(plan.directory) == contents(uncut.directory)


@dataclass(frozen=True)
class Share:
    """What the extraction asks of accelerate's PartialState, for processes that run one after the other."""

    process_index: int
    num_processes: int

    def wait_for_everyone(self) -> None:
        pass


def test_each_process_makes_its_own_shards_and_the_first_writes_the_index_when_all_exist(
    target: Target, tmp_path: Path
) -> None:
    plan = caches.plan(tmp_path / "shared", target, DATA)
    with pytest.raises(UserError, match="absent after the extraction"):
        extract(target, plan, Share(0, 2), {})
    written = [plan.state_of(shard) == "whole" for shard in range(len(plan.shards))]
    assert written == [shard % 2 == 0 for shard in range(len(plan.shards))]
    assert extract(target, plan, Share(1, 2), {}) is None
    assert extract(target, plan, Share(0, 2), {}) is not None
    single = caches.plan(tmp_path / "single", target, DATA)
    run(target, single)
    assert contents(plan.directory) == contents(single.directory)


def test_a_smaller_run_removes_the_surplus_shards_and_the_index_fits(target: Target, tmp_path: Path) -> None:
    caches.cache(tmp_path, target, DATA)
    fewer = TokenisedData(DATA.train[:3], DATA.held_out)
    plan = caches.plan(tmp_path, target, fewer)
    run(target, plan, may_replace=lambda: True)
    assert len(FeatureCache.open(tmp_path)) == 6
    assert sorted(contents(tmp_path)) == [FILE, *(plan.path_of(shard).name for shard in range(len(plan.shards)))]


def test_shards_of_other_rows_are_refused_unless_they_may_be_overwritten(target: Target, tmp_path: Path) -> None:
    caches.cache(tmp_path, target, DATA)
    require_own_shards(caches.plan(tmp_path, target, DATA), overwrite=False)
    other = caches.plan(tmp_path, target, TokenisedData(caches.rows(14, seed=5), []))
    with pytest.raises(UserError, match=r"shard-00000\.safetensors was made from other rows or by another target"):
        require_own_shards(other, overwrite=False)
    require_own_shards(other, overwrite=True)


def test_sound_shards_beyond_the_plan_are_refused_and_torn_ones_removed(target: Target, tmp_path: Path) -> None:
    larger, plan = (caches.plan(tmp_path, target, TokenisedData(rows, [])) for rows in (ROWS, ROWS[:3]))
    run(target, larger)
    (tmp_path / FILE).unlink()  # as if it had been interrupted
    last = larger.path_of(len(larger.shards) - 1)
    for path in set(tmp_path.glob("shard*")) - {last}:
        path.unlink()
    with pytest.raises(UserError, match=f"{last.name} was made from other rows"):
        run(target, plan)
    assert larger.state_of(len(larger.shards) - 1, thorough=True) == "whole"
    last.write_bytes(last.read_bytes()[:-4])
    run(target, plan)
    assert not last.exists() and len(FeatureCache.open(tmp_path)) == 3


def test_what_another_recipe_finished_while_the_target_was_loaded_is_not_removed(
    target: Target, tmp_path: Path
) -> None:
    stage = Stage("features", tmp_path, {"rows": "these"})
    nothing = TargetConfig(""), DataConfig(("rows.jsonl",)), FeaturesConfig(), Eagle1Section()
    sitting = Sitting(*nothing, stage, JobShare(), overwrite=False)
    plan = caches.plan(tmp_path, target, DATA)
    require_own_shards(plan, overwrite=False)  # as before the target is loaded
    other = caches.plan(tmp_path, target, TokenisedData(caches.rows(14, seed=5), []))
    run(target, other)
    before = contents(tmp_path)
    with pytest.raises(UserError, match=r"was made from other rows or by another target"):
        run(target, plan)
    for path in tmp_path.glob("shard*"):
        path.unlink()
    Stage("features", tmp_path, {"rows": "others"}).finish()
    with pytest.raises(UserError, match="holds another features"):
        run(target, plan, may_replace=sitting.may_replace)
    assert {name for name in before if not name.startswith("shard")} < set(contents(tmp_path))
    run(target, plan, may_replace=replace(sitting, overwrite=True).may_replace)
    assert len(FeatureCache.open(tmp_path)) == len(ROWS)


def test_a_target_whose_states_are_not_finite_is_refused_with_the_row_and_writes_no_shard(tmp_path: Path) -> None:
    broken = caches.load_target(tmp_path / "target")
    broken.model.get_decoder().layers[1].mlp.down_proj.weight.data[0, 0] = float("nan")
    plan = caches.plan(tmp_path / "features", broken, DATA)
    with pytest.raises(UserError, match=r"rows.jsonl: row \d+: the target's states are not finite in float32"):
        run(broken, plan)
    assert contents(plan.directory) == {}
