"""For every family of targets, drafts give the tokens of plain decoding, or are refused by name.

python -m tests.test_targets > docs/targets.md
tries every causal LM of transformers in miniature, and the text part of every model that also reads
images or sound.
"""

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ChainConfig, DynamicConfig
from aerie.configs.schema.heads import Eagle1Section, TargetConfig
from aerie.data.batches import check_padding, forward
from aerie.infer.decode import check
from aerie.infer.decode.drafters import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import tree_proposer
from aerie.model.checkpoint import new_head
from aerie.model.miniature import SPEED, lengths_to_check, miniature, small_model
from aerie.model.storage import first_line
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import steered
from tests.train.test_main import write_recipe

FAST = {
    **dict.fromkeys(("llama", "gpt2", "gpt_neox", "falcon", "opt", "gemma2"), "tree"),
    **dict.fromkeys(("deepseek_v3", "phi3"), "tree"),
    **dict.fromkeys(("mpt", "gpt_neo"), "chain"),
    **dict.fromkeys(("qwen3_next", "rwkv"), "trained"),
    **dict.fromkeys(("aya_vision", "qwen2_5_vl"), "tree"),
    **dict.fromkeys(("bert", "blip"), "refused"),
}
MULTIMODAL = [
    name
    for name in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
]
# These families rotate positions by time, height and width; their defaults lack mrope_section.
MROPE = """glm46v glm4v glm4v_moe glm_ocr glmga paddleocr_vl qwen2_5_vl qwen2_vl
qwen2_5_omni_thinker qwen3_omni_moe_thinker""".split()
ALL_STATES = ("falcon", "gpt_neo", "mpt", "rwkv")  # these cannot be told which states to keep


@pytest.mark.parametrize("name", FAST)
def test_a_family_decodes_as_it_does_alone_or_is_refused_by_name(name: str) -> None:
    result = outcome(name)
    assert result.word == FAST[name] and (result.word == "tree" or name in result.why), result


@pytest.mark.parametrize("name", sorted({*FAST} - {"bert", "blip"}))
def test_states_of_right_padded_rows_need_no_mask_and_only_the_taps_are_kept(name: str) -> None:
    target = Target(small(name), TargetConfig(path=name))
    counts: list[int] = []  # how many states each forward returns
    target.decoder.register_forward_hook(
        lambda _, __, out: counts.append(sum(state is not None for state in out.hidden_states))
    )
    ids = torch.randint(5, 97, (3, 24), generator=torch.Generator().manual_seed(1))
    output, mask = forward(target, ids, torch.tensor([24, 9, 17]), (0, 2))
    with torch.inference_mode():
        masked = target.decoder(
            input_ids=ids, attention_mask=mask.long(), use_cache=False, output_hidden_states=True
        )
    taps = torch.cat([masked.hidden_states[0], masked.hidden_states[2]], dim=-1)
    assert counts[0] == (5 if name in ALL_STATES else 2) and output.taps is not None
    assert output.taps[mask].equal(taps[mask])
    assert output.last_hidden[mask].equal(masked.last_hidden_state[mask])


@pytest.mark.slow
def test_no_family_is_wrong_and_none_ends_in_a_traceback() -> None:
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL]
    assert "WRONG" not in page()
    assert sum(outcome(name).word == "tree" for name in names) >= 130


def test_a_hybrid_target_trains_and_exports_a_head_and_says_that_it_does_not_decode(
    tmp_path: Path, capsys: Any
) -> None:
    target = tmp_path / "qwen3_next"
    small_model(AutoConfig.for_model("qwen3_next"), vocab_size=320).save_pretrained(target)
    tiny.tokenizer().save_pretrained(target)
    tiny.write_conversations(tmp_path / "train.jsonl", 12)
    steps = {"max_steps": 2, "eval_every": 0}
    write_recipe(tmp_path / "recipe.yaml", tmp_path, steps, target={"path": str(target)})
    text = """
    aerie features --config {tmp}/recipe.yaml --plan
        {why}
    aerie features --config {tmp}/recipe.yaml
    aerie train --config {tmp}/recipe.yaml
    aerie convert {tmp}/run/heads/eagle1 --to safeailab --target {target} --out {tmp}/out
    aerie generate --target {target} --prompt x
        exit 2
        error: {target}: {why}
    """
    why = (
        "qwen3_next has ['linear_attention'] layers, and drafts need plain attention: heads can be"
    )
    tiny.session(text, capsys, tmp=tmp_path, target=target, why=why)


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
    target.rope_switch = None  # now a row of 36 tokens changes RoPE for a row of 12 beside it
    with (
        monkeypatch.context() as patch,
        pytest.raises(UserError, match="if its batch has a longer row of 36 tokens"),
    ):
        patch.setattr("aerie.data.batches.lengths_to_check", lambda _: {36: 0.0})
        check_padding(target)


def test_longrope_decodes_as_plainly() -> None:
    """This holds before, across and beyond the original length, and for padded rows."""
    target = Target(small("phi3"), TargetConfig(path="phi3"))
    assert target.rope_switch == 28
    check_padding(target)  # rows of 32 and 10 tokens
    target.model.generation_config.eos_token_id = None
    for length in (8, 27, 28, 29, 40):
        ids = torch.randint(5, 97, (1, length), generator=torch.Generator().manual_seed(length))
        theirs = target.model.generate(ids, max_new_tokens=12, do_sample=False)
        for method in ("vanilla", "pld", "lookahead"):
            decoder = SpeculativeDecoder.from_pretrained(target, method=method)
            generation = decoder.generate(ids, max_new_tokens=12, do_sample=False)
            assert torch.equal(generation.sequences, theirs), length


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_narrow_dtype_hides_no_wrong_tree(
    dtype: torch.dtype, monkeypatch: Any, capsys: Any
) -> None:
    refusal = "GPTNeoForCausalLM .gpt_neo.: its logits for a draft tree after 14 tokens"
    for can_be_small in (True, False):  # False: the check uses a copy in float32
        monkeypatch.setattr(
            check, "miniature", check.miniature if can_be_small else lambda *_: None
        )
        tiny.refused(
            refusal, check.checked_lm, Target(small("gpt_neo").to(dtype), TargetConfig(path="neo"))
        )
    monkeypatch.setattr(check, "MOST_COPIED", 0)
    check.checked_lm(Target(small("llama").to(dtype), TargetConfig(path="llama")))
    warning = "llama: LlamaForCausalLM (llama): no small model of its kind can be built"
    assert warning in capsys.readouterr().err


def test_a_large_target_is_checked_once_and_again_where_its_weights_change(
    tmp_path: Path, monkeypatch: Any
) -> None:
    checked: list[str] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(check, "LARGE", 1000)
    monkeypatch.setattr(check, "_fault", lambda target, form: checked.append(form))
    for seed in (0, 0, 1):
        config = TargetConfig(str(tiny.target(tmp_path / f"target-{seed}", seed=seed)))
        SpeculativeDecoder(Target.load(config))
    assert checked == ["chain", "chain"]
    monkeypatch.setitem(SPEED, "cpu", 1.0)  # too slow for long texts, which a miniature reads
    SpeculativeDecoder(Target.load(TargetConfig(str(tiny.target(tmp_path / "target-2", seed=2)))))
    assert len(checked) == 4
    monkeypatch.setattr(check, "_fault", lambda target, form: "is wrong")
    for _ in range(2):  # a refusal is not cached
        tiny.refused(
            r"LlamaForCausalLM .llama.: is wrong; aerie trains",
            SpeculativeDecoder.from_pretrained,
            Target.load(config),
            method="lookahead",
        )


PHI3 = {
    "rope_parameters": {
        **{"rope_type": "longrope", "rope_theta": 1e4},
        **{"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 5.0, 7.0, 9.0]},
    },
    **{"original_max_position_embeddings": 28, "pad_token_id": None},
}
DRAFTS = {"tree": DynamicConfig(levels=4, k=3, nodes=12), "chain": ChainConfig(levels=4)}
WORDS = {
    "tree": "decode with draft trees, and the tokens are those of `generate`",
    "chain": "decode with chains and without drafts, and the tokens are those of `generate`; "
    "trees are refused",
    "trained": "train and export heads; decoding is refused",
    "refused": "are refused",
    "not built": "cannot be built in miniature here, so nothing is known about them",
    "WRONG": "are WRONG",
}

CONSEQUENCE = re.compile(r"; decoding would|[;:] heads can|; aerie trains")  # after the reason
SETTINGS_OF_A_MODEL = """eos_token_id forced_eos_token_id pad_token_id suppress_tokens
begin_suppress_tokens encoder_no_repeat_ngram_size""".split()


@dataclass(frozen=True)
class Outcome:
    word: str
    why: str = ""


def small(name: str) -> Any:
    config = CONFIG_MAPPING[name]()
    if name in MROPE:
        text_config = config.get_text_config()
        text_config.rope_parameters = {
            **(text_config.rope_parameters or {}),
            "mrope_section": [16, 24, 24],
        }
        config.vision_start_token_id = 5
    return small_model(config, **(PHI3 if name == "phi3" else {}))


@cache
def outcome(name: str) -> Outcome:
    try:
        model = small(name)
    except Exception as error:
        return Outcome("not built", f"{type(error).__name__}: {first_line(error)}"[:100])
    try:
        return _outcome(model, name)
    except Exception as error:
        frame = extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        return Outcome("WRONG", why)


def _outcome(model: Any, name: str) -> Outcome:
    try:
        target = Target(model, TargetConfig(path=name))
        check_padding(target)
        head = new_head(
            Eagle1Section(max_position_embeddings=256, rope_theta=1e4),
            target.config,
            target.vocab,
            0,
        ).eval()
    except UserError as error:
        return Outcome("refused", str(error))
    for setting in SETTINGS_OF_A_MODEL:
        setattr(model.generation_config, setting, None)
    ids = torch.randint(5, 97, (1, 24), generator=torch.Generator().manual_seed(1))
    refusals = []
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    for form, shape in DRAFTS.items():
        try:
            decoder = SpeculativeDecoder(target, tree_proposer(EagleDrafter(head, target), shape))
        except UserError as error:
            refusals.append(str(error))
            continue
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        for some_decoder in [
            SpeculativeDecoder(target),
            steered(decoder, [(ids, theirs[0, 24:].tolist())], right=True),
        ]:
            out = some_decoder.generate(ids, eos_token_id=[], **options)
            if not torch.equal(out.sequences, theirs):
                return Outcome("WRONG", f"{out.new_ids} are not {theirs[0, 24:].tolist()}")
        assert out.statistics.tau > 2, "drafts are steered"
        return Outcome(form, *refusals)
    return Outcome("trained", refusals[-1])


def page() -> str:
    """docs/targets.md."""
    return (
        f"# Targets\n\nWritten by `python -m tests.test_targets` with transformers "
        f"{transformers.__version__}: every architecture of\n"
        "`AutoModelForCausalLM`, in miniature with random weights in float32 and the family's\n"
        "default layers. A checkpoint's own layer types decide. aerie trains and\n"
        "exports heads for the first three groups. For quantised, gated and merged targets see\n"
        "[troubleshooting](troubleshooting.md#which-targets).\n"
        f"{table([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES])}\n"
        "# Text parts of models that also read images or sound\n\n"
        "The other architectures of `AutoModelForMultimodalLM`, tried on text in the same way.\n"
        f"{table(MULTIMODAL)}"
    )


def table(names: list[str]) -> str:
    """The outcome for each of these families, in a section for each kind of outcome."""
    reasons = defaultdict[str, dict[str, str]](dict)  # word -> family -> why
    for name in names:
        result = outcome(name)
        why = CONSEQUENCE.split(result.why.removeprefix(f"{name}: "))
        reasons[result.word][name] = " ".join(why[0].split())
    text = ""
    for word in (word for word in WORDS if reasons[word]):
        text += f"\n## {len(reasons[word])} {WORDS[word]}\n\n"
        if any(reasons[word].values()):
            rows = [f"| {name} | {why} |\n" for name, why in reasons[word].items()]
            text += "".join(["| | why |\n|---|---|\n", *rows])
        else:
            text += ", ".join(reasons[word]) + ".\n"
    return text


if __name__ == "__main__":
    print(table(sys.argv[1:]) if sys.argv[1:] else page(), end="")
