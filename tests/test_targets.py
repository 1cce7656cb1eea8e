"""For every family of targets, trees and chains give the tokens of plain decoding, or it is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aerie.configs.errors import UserError
from aerie.configs.schema.heads import TargetConfig
from aerie.data import main as data
from aerie.data.batches import check_padding, forward
from aerie.infer import main as infer
from aerie.infer.decode import check
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.model import main as model
from aerie.model.miniature import SPEED, lengths_to_check, miniature, small_model
from aerie.model.target import Target
from aerie.train import main as train
from tests import tiny
from tests.targets import outcome, small, table
from tests.train.test_main import write_recipe

FAST = {
    "llama": "tree",
    "gpt2": "tree",
    "gpt_neox": "tree",
    "falcon": "tree",
    "opt": "tree",
    "gemma2": "tree",
}
FAST |= {
    "deepseek_v3": "tree",
    "phi3": "tree",
    "mpt": "chain",
    "gpt_neo": "chain",
    "qwen3_next": "trained",
}
FAST |= {"rwkv": "trained", "bert": "refused"}


@pytest.mark.parametrize("name", FAST)
def test_a_family_decodes_as_it_does_alone_or_is_refused_by_name(name: str) -> None:
    seen = outcome(name)
    assert seen.word == FAST[name] and (seen.word == "tree" or name in seen.why), seen


@pytest.mark.parametrize("name", sorted({*FAST} - {"bert"}))
def test_states_of_right_padded_rows_need_no_mask_and_only_the_taps_are_kept(name: str) -> None:
    target, kept, lengths = (
        Target(small(name), TargetConfig(path=name)),
        list[int](),
        torch.tensor([24, 9, 17]),
    )
    ids = torch.randint(5, 97, (3, 24), generator=torch.Generator().manual_seed(1))
    target.decoder.register_forward_hook(
        lambda _, __, out: kept.append(sum(x is not None for x in out.hidden_states))
    )
    output, mask = forward(target, ids, lengths, (0, 2))
    with torch.inference_mode():
        own = target.decoder(
            input_ids=ids, attention_mask=mask.long(), use_cache=False, output_hidden_states=True
        )
    assert output.taps is not None and kept[0] == (
        5 if name in ("falcon", "gpt_neo", "mpt", "rwkv") else 2
    )
    assert output.taps[mask].equal(
        torch.cat([own.hidden_states[0], own.hidden_states[2]], dim=-1)[mask]
    )
    assert output.last_hidden[mask].equal(own.last_hidden_state[mask])


@pytest.mark.slow
def test_no_family_is_wrong_and_none_ends_in_a_traceback() -> None:
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    assert "WRONG" not in table(names) and sum(outcome(name).word == "tree" for name in names) >= 80


def test_a_hybrid_target_trains_and_exports_a_head_and_says_that_it_does_not_decode(
    tmp_path: Path, capsys: Any
) -> None:
    for kind in ("qwen3_next", "mpt"):
        small_model(AutoConfig.for_model(kind), vocab_size=320).save_pretrained(tmp_path / kind)
        tiny.tokenizer().save_pretrained(tmp_path / kind)
    tiny.write_conversations(tmp_path / "train.jsonl", 12)
    target, steps = tmp_path / "qwen3_next", {"max_steps": 2, "eval_every": 0}
    recipe = write_recipe(tmp_path / "recipe.yaml", tmp_path, steps, target={"path": str(target)})
    why = "qwen3_next has ['linear_attention'] layers, and drafts need plain attention: heads can be trained"
    assert tiny.call(data, "features", "--config", recipe, "--plan") == 0
    assert capsys.readouterr().err.count(why) == 1
    assert (
        tiny.call(data, "features", "--config", recipe) == tiny.call(train, "--config", recipe) == 0
    )
    head, out = tmp_path / "run/heads/eagle1", tmp_path / "out"
    assert (
        tiny.call(model, "convert", head, "--to", "safeailab", "--target", target, "--out", out)
        == 0
    )
    capsys.readouterr()
    assert tiny.call(infer, "generate", "--target", target, "--prompt", "x") == 2
    assert f"error: {target}: {why}" in capsys.readouterr().err
    # mpt counts positions by cache rows: only chains are right
    assert (
        tiny.call(
            data,
            "features",
            "--config",
            recipe,
            "--run",
            tmp_path / "2",
            "--target.path",
            tmp_path / "mpt",
            "--plan",
        )
        == 0
    )
    assert (
        "MptForCausalLM (mpt): its logits for a draft tree after 16 tokens"
        in capsys.readouterr().err
    )
    assert (
        tiny.call(
            infer, "generate", "--target", tmp_path / "mpt", "--prompt", "x", "--max-new-tokens", 3
        )
        == 0
    )
    assert (
        tiny.call(
            infer,
            "generate",
            "--target",
            tmp_path / "mpt",
            "--prompt",
            "x",
            "--method",
            "lookahead",
        )
        == 2
    )
    assert (
        "use a method that drafts a chain (eagle-chain, sps, pld), or vanilla"
        in capsys.readouterr().err
    )


def test_a_miniature_of_a_longrope_target_is_tried_across_its_original_length(
    monkeypatch: Any,
) -> None:
    factors = {
        "short_factor": [1.0 + k for k in range(48)],
        "long_factor": [2.0 + 3.0 * k for k in range(48)],
    }
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **factors}
    sizes = {
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "max_position_embeddings": 131072,
    }  # Phi-4-mini's
    config = AutoConfig.for_model(
        "phi3",
        **sizes,
        rope_parameters=rope,
        original_max_position_embeddings=4096,
        pad_token_id=None,
    )
    target = miniature(config, TargetConfig(path="phi"))
    assert target is not None and target.rope_switch == 28 and max(lengths_to_check(target)) > 28
    check.checked_lm(target)
    check_padding(target)
    target.rope_switch = None  # a row of 36 tokens changes RoPE for one of 12
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="beside a longer row of 36 tokens"),
    ):
        patch.setattr("aerie.data.batches.lengths_to_check", lambda _: {36: 0.0})
        check_padding(target)


def test_longrope_is_that_of_each_row_and_of_plain_decoding_before_across_and_beyond_its_original_length() -> (
    None
):
    target = Target(small("phi3"), TargetConfig(path="phi3"))
    assert target.rope_switch == 28
    check_padding(target)  # rows of 32 and 10 tokens
    target.model.generation_config.eos_token_id = None
    for length in (8, 27, 28, 29, 40):
        ids = torch.randint(5, 97, (1, length), generator=torch.Generator().manual_seed(length))
        theirs = target.model.generate(ids, max_new_tokens=12, do_sample=False)
        for method in ("vanilla", "pld", "lookahead"):
            decoder = SpeculativeDecoder.from_pretrained(target, method=method)
            assert torch.equal(
                decoder.generate(ids, max_new_tokens=12, do_sample=False).sequences, theirs
            ), length


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_dtype_hides_no_wrong_tree(
    dtype: torch.dtype, monkeypatch: Any, capsys: Any
) -> None:
    refusal = "GPTNeoForCausalLM .gpt_neo.: its logits for a draft tree after 14 tokens"
    for can_be_small in (True, False):  # False: checked by a copy in float32
        monkeypatch.setattr(
            check, "miniature", check.miniature if can_be_small else lambda *_: None
        )
        with pytest.raises(UserError, match=refusal):
            check.checked_lm(Target(small("gpt_neo").to(dtype), TargetConfig(path="neo")))
    monkeypatch.setattr(check, "COPIED", 0)
    check.checked_lm(Target(small("llama").to(dtype), TargetConfig(path="llama")))
    assert (
        "llama: LlamaForCausalLM (llama): no small model of its kind can be built"
        in capsys.readouterr().err
    )


def test_a_large_target_is_checked_once_and_again_where_its_weights_change(
    tmp_path: Path, monkeypatch: Any
) -> None:
    asked: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(check, "LARGE", 1000)
    monkeypatch.setattr(check, "_fault", lambda target, form: asked.append(form))
    for seed in (0, 0, 1):
        config = TargetConfig(str(tiny.target(tmp_path / f"target-{seed}", seed=seed)))
        SpeculativeDecoder(Target.load(config))
    assert asked == ["chain", "chain"]
    monkeypatch.setitem(SPEED, "cpu", 1.0)  # too slow for long texts: a miniature reads them
    SpeculativeDecoder(Target.load(TargetConfig(str(tiny.target(tmp_path / "target-2", seed=2)))))
    assert len(asked) == 4
    monkeypatch.setattr(check, "_fault", lambda target, form: "is wrong")
    for _ in range(2):  # a refusal is not cached
        with pytest.raises(
            UserError, match=r"LlamaForCausalLM .llama.: is wrong; heads can be trained"
        ):
            SpeculativeDecoder.from_pretrained(Target.load(config), method="lookahead")
