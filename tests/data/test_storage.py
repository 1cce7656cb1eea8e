"""Laws of the stored forms: how large, how far from the states, and what a batch makes of them."""

from pathlib import Path

import pytest
import torch

from aerie.configs.errors import UserError
from aerie.data.batches import collate
from aerie.data.cache import Form, Storage, decode, encode, mean_error, measured_error
from aerie.data.tokens import TokenisedData
from aerie.train.jobs import Request, cached_source
from tests import tiny
from tests.data import caches

FORMS: list[Form] = ["bf16", "fp8", "int8"]


def states(tokens: int = 200, width: int = 64, num_states: int = 3) -> torch.Tensor:
    """States whose sizes differ by token and by state, and in which one dimension is a hundred times the others."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(tokens, num_states, width, generator=generator)
    made *= 10.0 ** torch.randint(-4, 4, (tokens, num_states, 1), generator=generator)
    made[..., 5] *= 100
    return made.flatten(1)


def restored(form: Form, made: torch.Tensor, num_states: int) -> torch.Tensor:
    stored = encode(made, num_states, Storage(torch.float32, form))
    return decode(stored.values, stored.scales, torch.float32)


@pytest.mark.parametrize("form", FORMS)
def test_every_value_is_within_the_forms_own_step_of_what_it_was(form: Form) -> None:
    made = states()
    largest = made.unflatten(1, (3, -1)).abs().amax(-1, keepdim=True).expand(-1, -1, 64).flatten(1)
    bound = {
        "bf16": made.abs() / 256,
        "fp8": (made.abs() / 16).clamp_min(largest / 448 / 1024),  # half a step: 3 bits, then subnormals of 2 ** -9
        "int8": largest / 127 / 2,
    }[form]
    assert ((restored(form, made, 3) - made).abs() <= 1.001 * bound).all()


@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_each_token_and_state_has_a_scale_of_its_own(form: Form) -> None:
    made = states()
    louder = made.clone().unflatten(1, (3, -1))
    louder[7, 1] *= 1e6
    changed = restored(form, louder.flatten(1), 3) != restored(form, made, 3)
    assert changed.unflatten(1, (3, -1)).any(-1).nonzero().tolist() == [[7, 1]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_told_by_token_and_zeros_stay_zeros(form: Form, bad: float) -> None:
    made = states()
    made[3] = 0.0
    made[9, 100] = bad
    stored = encode(made, 3, Storage(torch.float32, form))
    assert (~stored.finite).nonzero().flatten().tolist() == [9]
    assert decode(stored.values, stored.scales, torch.float32)[3].eq(0).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_state_that_its_dtype_cannot_hold_is_not_finite_though_its_scale_is(form: Form) -> None:
    made = states(width=8) / 1e12
    made[9, 3], made[4, 3] = 80_000.0, 60_000.0  # float16 ends at 65,504
    stored = encode(made, 3, Storage(torch.float16, form))
    assert (~stored.finite).nonzero().flatten().tolist() == [9]
    assert torch.isfinite(decode(stored.values, stored.scales, torch.float16)).all(-1).equal(stored.finite)


def test_a_few_huge_dimensions_do_not_hide_what_int8_does_to_the_others() -> None:
    made, ends = states(num_states=1), tiny.ends(hidden_size=64)
    errors = {form: measured_error(made, None, 0, Storage(torch.float32, form), ends.logits) for form in FORMS}
    assert max(error.values[0] for error in errors.values()) < 0.03
    assert errors["bf16"].dimensions[0] < 0.003 < errors["fp8"].dimensions[0] < 0.05 < errors["int8"].dimensions[0]
    assert errors["bf16"].law < errors["fp8"].law
    assert errors["bf16"].choice > 0.98 and len(made) == errors["bf16"].num_tokens
    exact = measured_error(made, made, 1, Storage(torch.float32), ends.logits)
    assert exact.values == exact.dimensions == (0.0, 0.0) and (exact.law, exact.choice) == (0.0, 1.0)


def test_errors_of_shards_are_weighed_by_their_tokens() -> None:
    ends = tiny.ends(hidden_size=64)
    error = measured_error(states(30, 64, 1), None, 0, Storage(torch.float32, "int8"), ends.logits)
    exact = measured_error(states(90, 64, 1), None, 0, Storage(torch.float32), ends.logits)
    both = mean_error([error, exact])
    assert both is not None and both.num_tokens == 120 and both.law == pytest.approx(error.law / 4)
    assert mean_error([]) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_holds_the_states_as_they_are_used_once_it_has_moved(form: Form, packed: bool, tmp_path: Path) -> None:
    target = caches.load_target(tmp_path / "target")
    data = TokenisedData(caches.rows(6), caches.rows(2, seed=1))
    plain = caches.cache(tmp_path / "plain", target, data, after_blocks=(1, 3))
    stored = caches.cache(tmp_path / form, target, data, after_blocks=(1, 3), storage=form)
    sizes = [shard.num_bytes for shard in stored.contents.shards]
    assert sum(sizes) < (0.75 if form == "bf16" else 0.6) * sum(shard.num_bytes for shard in plain.contents.shards)
    exact, read = (collate([cache[row] for row in (0, 4, 2)], (0, 4, 2), packed).to("cpu") for cache in (plain, stored))
    assert read.scales is None and read.dtype is None
    width = target.hidden_size
    for whole, found, taps in ((exact.features, read.features, 1), (exact.taps, read.taps, 2)):
        assert whole is not None and found is not None and found.dtype == torch.float32
        assert found.eq(0).eq(whole.eq(0)).float().mean() > 0.9  # padding stays zero
        error = (found - whole).norm() / whole.norm()
        assert 0 < error < 0.05 and found.shape[-1] == taps * width
        tokens = found.flatten(0, 1).unflatten(-1, (taps, -1))
        for row, token in zip(whole.flatten(0, 1).unflatten(-1, (taps, -1)), tokens, strict=True):
            torch.testing.assert_close(token, row, atol=float(row.abs().max()) / 20, rtol=0)
    measured = stored.contents.error
    assert measured is not None and plain.contents.error is None and len(measured.values) == 3
    assert measured.num_tokens >= 8 * len(sizes) and 0 < measured.law < 0.2


def test_training_refuses_a_cache_in_another_form_than_the_recipe_asks(tmp_path: Path) -> None:
    from aerie.configs.schema.data import DataConfig, FeaturesConfig
    from aerie.configs.schema.target_and_head import Eagle1Section

    target = caches.load_target(tmp_path / "target")
    caches.cache(tmp_path / "cache", target, TokenisedData(caches.rows(4), []), storage="int8")
    data = DataConfig(conversations=("rows.jsonl",))
    asked = Request(Eagle1Section(), target.recipe, data, FeaturesConfig(storage="fp8"))
    with pytest.raises(UserError, match="built with "):
        cached_source(tmp_path / "cache", asked)
