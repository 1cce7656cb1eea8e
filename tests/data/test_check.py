"""Laws of checking a cache: whatever happens to its files is found, named with its place, and never trained on."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file

from aerie.configs.errors import UserError
from aerie.data.cache import FILE, FeatureCache, ShardBuffer, Storage, encode, read_index, state_of, write_index
from aerie.data.features import CachePlan, check, extract
from aerie.data.tokens import TokenisedData
from aerie.model.target import Target
from tests.data import caches

DATA = TokenisedData(train=caches.rows(14), held_out=caches.rows(3, seed=1))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    torch.set_num_threads(1)
    return caches.load_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def plan(target: Target, tmp_path: Path) -> CachePlan:
    """The plan of a cache that has been written, in several shards."""
    made = caches.plan(tmp_path / "features", target, DATA, after_blocks=(1,), shard_tokens=90)
    extract(target, made, PartialState(), {})
    assert len(made.shards) >= 4
    return made


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def tear(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def make_stale(path: Path) -> None:
    """Puts a sound shard of the same length, of other states, where the index lists this one."""
    with safe_open(path, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    tensors["last_hidden"] += 1
    path.unlink()
    save_file(tensors, path, metadata={"made_of": "rows 0, origin 0, seal 0123456789abcdef"})


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "torn": (tear, "shard-00002.safetensors: cannot be read"),
    "flipped at the end": (lambda path: flip(path, -5), "shard-00002.safetensors: row "),
    "flipped in the header": (lambda path: flip(path, 60), "shard-00002.safetensors: "),
    "deleted": (Path.unlink, "shard-00002.safetensors: missing"),
    "empty": (lambda path: path.write_bytes(b""), "shard-00002.safetensors: cannot be read"),
    "swapped": (make_stale, "shard-00002.safetensors: its seal does not match"),
    "another shard": (lambda path: shutil.copy(path.with_name("shard-00001.safetensors"), path) and None, "stale"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGES.values(), ids=DAMAGES)
def test_each_damage_is_named_never_read_and_mended_alone(
    damage: Callable[[Path], None], said: str, plan: CachePlan, target: Target
) -> None:
    before = {path.name: path.read_bytes() for path in plan.directory.iterdir()}
    assert check(plan.directory).problems == ()
    damage(plan.path_of(2))
    found = check(plan.directory)
    assert len(found.problems) == 1 and said in found.problems[0], found.problems
    assert found.num_shards == len(plan.shards) - 1
    assert "features --config RECIPE --verify" in found.text(plan.directory)
    with pytest.raises(UserError, match=r"shard-00002\.safetensors"):
        list(FeatureCache.open(plan.directory))
    kept = plan.path_of(1).stat().st_mtime_ns
    extract(target, plan, PartialState(), {}, may_replace=lambda: True)  # as in a cache of this recipe
    assert {path.name: path.read_bytes() for path in plan.directory.iterdir()} == before
    assert plan.path_of(1).stat().st_mtime_ns == kept
    assert check(plan.directory).problems == ()


def test_a_sound_shard_of_the_same_rows_and_size_by_another_target_is_not_taken_for_the_listed_one(
    plan: CachePlan, target: Target, tmp_path: Path
) -> None:
    other = caches.plan(tmp_path / "other", target, DATA, after_blocks=(2,), shard_tokens=90)
    extract(target, other, PartialState(), {})
    shutil.copy(other.path_of(2), plan.path_of(2))
    assert check(plan.directory).problems == (
        "shard-00002.safetensors: is not the shard that index.json lists: the index is stale",
    )
    with pytest.raises(UserError, match=r"shard-00002\.safetensors: is not the shard that index\.json lists"):
        list(FeatureCache.open(plan.directory))


def test_a_change_of_any_byte_is_found(plan: CachePlan) -> None:
    path, digest = min((plan.path_of(n), plan.rows_digests[n]) for n in range(len(plan.shards)))
    size = path.stat().st_size
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    for place in [*range(0, header, 5), *range(97, 110), *range(header, size, size // 40), size - 1]:
        flip(path, place)
        assert state_of(path, digest, plan.origin, thorough=True) == "damaged", place
        flip(path, place)
    assert state_of(path, digest, plan.origin, thorough=True) == "whole"


def test_states_that_the_indexs_dtype_cannot_hold_are_found(target: Target, tmp_path: Path) -> None:
    made = caches.plan(tmp_path / "features", target, DATA, dtype="float16", storage="int8")
    extract(target, made, PartialState(), {})
    assert check(made.directory).problems == ()
    rows = made.rows_of(0)
    buffer = ShardBuffer(rows, made.hidden_size, 0, Storage(torch.float32, "int8"))  # as was written before
    for place, row in enumerate(rows):
        buffer.put(place, encode(torch.full((len(row.input_ids), made.hidden_size), 8e4), 1, buffer.storage), None)
    seal = buffer.save(made.path_of(0), made.origin)
    contents = read_index(made.directory, sizes=False)
    write_index(
        made.directory, replace(contents, shards=(replace(contents.shards[0], checksum=seal), *contents.shards[1:]))
    )
    problem = "row 1 of the shard has states that are not finite (row 0 of the cache, counted from 0)"
    assert check(made.directory).problems == (f"shard-00000.safetensors: {problem}",)


def test_a_stale_index_is_found_and_a_lost_one_costs_no_shard(plan: CachePlan, target: Target, tmp_path: Path) -> None:
    old = (plan.directory / FILE).read_text()
    extra = caches.plan(tmp_path / "features", target, TokenisedData(caches.rows(14, seed=3), DATA.held_out))
    for path in plan.directory.iterdir():
        path.rename(tmp_path / path.name)
    extract(target, extra, PartialState(), {})
    (plan.directory / FILE).write_text(old)
    problems = check(plan.directory).problems
    assert problems and all("index.json" in line for line in problems)
    with pytest.raises(UserError):
        list(FeatureCache.open(plan.directory))
    (plan.directory / FILE).unlink()
    assert "index.json: missing" in check(plan.directory).problems[0]
    times = [path.stat().st_mtime_ns for path in sorted(plan.directory.glob("shard*"))]
    extract(target, extra, PartialState(), {})
    assert [path.stat().st_mtime_ns for path in sorted(plan.directory.glob("shard*"))] == times
    assert check(plan.directory).problems == ()


def test_a_broken_index_and_a_shard_too_many_are_named(plan: CachePlan) -> None:
    shutil.copy(plan.path_of(0), plan.path_of(77))
    assert check(plan.directory).problems == ("shard-00077.safetensors: not in index.json",)
    plan.path_of(77).unlink()
    (plan.directory / FILE).write_text("{")
    assert "index.json: not JSON" in check(plan.directory).problems[0]


def test_where_there_is_no_cache_the_command_that_builds_one_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such feature cache; build it with"):
        check(tmp_path / "features")


def test_a_shard_of_before_there_were_checksums_is_read_and_counted_as_unchecked(plan: CachePlan) -> None:
    path, contents = plan.path_of(0), read_index(plan.directory)
    rows, expected = contents.shards[0].rows, FeatureCache.open(plan.directory)[0].last_hidden
    with safe_open(path, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    del tensors["checksums"]
    path.unlink()
    save_file(tensors, path, metadata={"made_of": f"rows {rows}, origin {plan.origin}"})
    old = (plan.directory / FILE).read_text()
    old = old.replace(f'"{contents.shards[0].checksum}"', "null")
    old = old.replace(f'"num_bytes": {contents.shards[0].num_bytes}', f'"num_bytes": {path.stat().st_size}', 1)
    (plan.directory / FILE).write_text(old.replace(f'"{contents.seal}"', "null"))
    assert FeatureCache.open(plan.directory)[0].last_hidden.equal(expected)
    found = check(plan.directory)
    assert found.problems == () and found.unsealed == 1
    assert plan.state_of(0, thorough=True) == "whole"


def test_a_changed_token_id_is_found_where_no_state_is_read(plan: CachePlan) -> None:
    path = plan.path_of(2)
    with safe_open(path, framework="pt") as handle:
        facts = handle.metadata()
        tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    assert len(list(FeatureCache.open(plan.directory).tokens())) == len(plan.rows)
    tensors["input_ids"][3] += 1
    path.unlink()
    save_file(tensors, path, metadata=facts)
    with pytest.raises(
        UserError, match=r"shard-00002\.safetensors: its token ids do not match their digest; .*--verify"
    ):
        list(FeatureCache.open(plan.directory).tokens())
