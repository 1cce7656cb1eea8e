"""Laws of the feature cache: it returns what was written, in every form, and nothing damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.data.batches import collate
from aerie.data.feature_cache import FeatureCache, Storage, StorageForm, decode, encode
from aerie.data.features import check_cache
from aerie.data.tokens import TokenisedData
from aerie.model.target import Target, load_vocab
from aerie.model.target_files import fingerprint
from tests.data import caches

FORMS: list[StorageForm] = ["bf16", "fp8", "int8"]
DATA = TokenisedData(train=caches.rows(11), held_out=caches.rows(4, seed=1))
ROWS = [*DATA.train, *DATA.held_out]


@pytest.fixture(scope="module")
def cache(target: Target, tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return caches.cache(tmp_path_factory.mktemp("cache"), target, DATA, after_blocks=(1, 3))


def test_views(cache: FeatureCache) -> None:
    """Splits and slices are views in order."""
    train, held_out = cache.split("train"), cache.split("held_out")
    assert len(cache.shards) > 2 and [row.input_ids.tolist() for row in cache] == [
        row.input_ids for row in ROWS
    ]
    assert [row.turn_ids.tolist() for row in held_out] == [row.turn_ids for row in DATA.held_out]
    assert train.lengths + held_out.lengths == cache.lengths == [len(row.input_ids) for row in ROWS]
    assert [row.turn_ids.tolist() for row in cache[3:9:2]] == [row.turn_ids for row in ROWS[3:9:2]]
    for view in (cache, train, held_out):
        assert [row for shard in view.shards for row in shard] == list(range(len(view)))
    found = [(ids.tolist(), turn_ids.tolist()) for ids, turn_ids in train.tokens()]
    assert found == [(row.input_ids, row.turn_ids) for row in DATA.train]


def test_foreign_cache(cache: FeatureCache, target: Target) -> None:
    """A cache of another target or recipe is refused: both values, and the command."""
    text_config, ends = load_vocab(
        TargetConfig(path=target.recipe.path)
    )  # without the trunk, as in training
    expected = {
        "target": fingerprint(target.recipe, text_config, ends),
        "after_blocks": (1, 3),
        "storage": None,
    }
    assert len(FeatureCache.open(cache.directory, expected)) == 15
    for name, value in (("after_blocks", [1, 2]), ("target", "other"), ("storage", "fp8")):
        with pytest.raises(
            UserError,
            match=rf"{name}.*: .* before, .* now; rebuild with: .* features .*--overwrite",
        ):
            FeatureCache.open(cache.directory, {name: value})


def states(tokens: int = 200, width: int = 64, num_states: int = 3) -> torch.Tensor:
    """States whose sizes differ by token and by state, one dimension a hundred times the others."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(tokens, num_states, width, generator=generator)
    made *= 10.0 ** torch.randint(-4, 4, (tokens, num_states, 1), generator=generator)
    made[..., 5] *= 100
    return made.flatten(1)


@pytest.mark.parametrize("form", FORMS)
def test_storage_forms(
    form: StorageForm,
) -> None:
    """Every value is within its form's step, and each token and state has a scale."""
    made = states()
    restored, louder = (
        decode(*encode(made, 3, Storage(torch.float32, form)), torch.float32),
        made.clone(),
    )
    largest = made.unflatten(1, (3, -1)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(1)
    bound = {
        "bf16": made.abs() / 256,
        "fp8": (made.abs() / 16).clamp_min(
            largest / 448 / 1024
        ),  # half a step: 3 bits; subnormals are 2 ** -9 apart
        "int8": largest / 127 / 2,
    }[form]
    assert ((restored - made).abs() <= 1.001 * bound).all()
    if form != "bf16":
        louder.unflatten(1, (3, -1))[7, 1] *= 1e6
        changed = (
            decode(*encode(louder, 3, Storage(torch.float32, form)), torch.float32) != restored
        )
        assert changed.unflatten(1, (3, -1)).any(-1).nonzero().tolist() == [[7, 1]]


@pytest.mark.parametrize("form", FORMS)
def test_batch_decodes(
    form: StorageForm, cache: FeatureCache, target: Target, tmp_path: Path
) -> None:
    """A batch holds the states as they are used once it has moved."""
    stored = caches.cache(tmp_path, target, DATA, after_blocks=(1, 3), storage=form)
    for packed in (False, True):
        exact, read = (
            collate([view[at] for at in (0, 4, 2)], (0, 4, 2), packed).to("cpu")
            for view in (cache, stored)
        )
        assert read.scales is None and read.dtype is None
        for whole, found, taps in ((exact.features, read.features, 1), (exact.taps, read.taps, 2)):
            assert whole is not None and found is not None and found.dtype == torch.float32
            assert found.eq(0).eq(whole.eq(0)).float().mean() > 0.9  # padding stays zero
            assert (
                0 < (found - whole).norm() / whole.norm() < 0.05
                and found.shape[-1] == taps * target.hidden_size
            )


@pytest.mark.parametrize("form", [None, "int8"])
def test_planned_bytes(form: StorageForm | None, target: Target, tmp_path: Path) -> None:
    """The planned bytes are those of the files."""
    many = TokenisedData(train=caches.rows(200), held_out=[])
    plan = caches.plan(tmp_path, target, many, after_blocks=(1, 3), storage=form, shard_tokens=3000)
    caches.write(target, plan)
    for shard in plan.shards:
        content = shard.path.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        assert len(content) - header == shard.num_tokens * plan.token_bytes
    planned, size = (
        sum(map(plan.bytes_of, plan.shards)),
        sum(map(len, caches.contents(tmp_path).values())),
    )
    assert 0 <= planned - size < 0.01 * size


def test_replaced_under_a_reader(cache: FeatureCache, target: Target, tmp_path: Path) -> None:
    """A cache that is replaced under a reader is noticed."""
    directory = shutil.copytree(cache.directory, tmp_path / "features")
    reader = FeatureCache.open(directory)
    before = reader[0].last_hidden
    caches.write(target, caches.plan(directory, target, DATA, after_blocks=(0, 3)), overwrite=True)
    assert reader[0].last_hidden.equal(before)  # its file is still open
    with pytest.raises(UserError, match="does not match its checksum"):
        list(reader)


def flip(path: Path, name: str = "last_hidden") -> None:
    """Changes one number of a shard, as a flipped bit on disk would, and nothing else."""
    tensors = load_file(path)
    tensors[name].view(-1)[7] = 99
    path.unlink()
    save_file(tensors, path)


SHARD = "shard-00001.safetensors"
DAMAGES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "torn shard": (SHARD, lambda path: path.write_bytes(path.read_bytes()[:-100])),
    "flipped state": (SHARD, flip),
    "flipped token id": (SHARD, lambda path: flip(path, "input_ids")),
    "another shard in its place": (
        SHARD,
        lambda path: shutil.copy(path.with_name("shard-00000.safetensors"), path),
    ),
    "changed index": (
        "index.json",
        lambda path: path.write_text(path.read_text().replace("   11\n", "   12\n")),
    ),
    "no record": ("shard-00001.json", Path.unlink),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_damage(
    name: str,
    damage: Callable[[Path], Any],
    cache: FeatureCache,
    target: Target,
    tmp_path: Path,
    capsys: Any,
) -> None:
    """Each damage is named never read and mended alone."""
    directory = tmp_path / "features"
    shutil.copytree(cache.directory, directory)
    times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert check_cache(directory) == 0
    capsys.readouterr()
    damage(directory / name)
    assert check_cache(directory) == 1
    out = capsys.readouterr().out
    assert f"{directory / name}: " in out and "features --config RECIPE --verify" in out
    with pytest.raises(UserError, match=rf"{name}.*: aerie features"):
        list(FeatureCache.open(directory))
    caches.write(target, caches.plan(directory, target, DATA, after_blocks=(1, 3)))
    assert (
        caches.contents(directory) == caches.contents(cache.directory)
        and check_cache(directory) == 0
    )
    mended = {"index.json", "shard-00001.safetensors", "shard-00001.json"}
    assert all(
        path.name in mended or path.stat().st_mtime_ns == times[path.name]
        for path in directory.iterdir()
    )
