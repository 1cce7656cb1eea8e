"""Tries every causal LM of transformers, in miniature, with aerie.

python -m tests.targets > docs/targets.md
"""

import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from traceback import extract_tb
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ChainConfig, DynamicConfig
from aerie.configs.schema.heads import Eagle1Section, TargetConfig
from aerie.data.batches import check_padding
from aerie.infer.decode.drafters import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import tree_proposer
from aerie.model.checkpoint import new_head
from aerie.model.miniature import small_model
from aerie.model.storage import first_line
from aerie.model.target import Target
from tests.infer.steered import steered

FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 5.0, 7.0, 9.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 28, "pad_token_id": None}
DRAFTS = {"tree": DynamicConfig(levels=4, k=3, nodes=12), "chain": ChainConfig(levels=4)}
WORDS = {
    "tree": "decode with draft trees, and the tokens are those of `generate`",
    "chain": "decode with chains and without drafts, and the tokens are those of `generate`; "
    "trees are refused",
    "trained": "train and export heads; decoding is refused",
    "refused": "are refused",
    "not built": "are not built in miniature here, so that nothing is said about them",
    "WRONG": "are WRONG",
}


SETTINGS_OF_A_MODEL = """eos_token_id forced_eos_token_id pad_token_id suppress_tokens
begin_suppress_tokens encoder_no_repeat_ngram_size""".split()


@dataclass(frozen=True)
class Outcome:
    word: str
    why: str = ""


def small(name: str) -> Any:
    return small_model(CONFIG_MAPPING[name](), **(PHI3 if name == "phi3" else {}))


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
        decoders = [
            SpeculativeDecoder(target),
            steered(decoder, [(ids, theirs[0, 24:].tolist())], right=True),
        ]
        for some_decoder in decoders:
            out = some_decoder.generate(ids, eos_token_id=[], **options)
            if not torch.equal(out.sequences, theirs):
                return Outcome("WRONG", f"{out.new_ids} are not {theirs[0, 24:].tolist()}")
        assert out.statistics.tau > 2, "drafts are steered"
        return Outcome(form, *refusals)
    return Outcome("trained", refusals[-1])


def table(names: list[str]) -> str:
    """The page docs/targets.md for these families."""
    reasons = defaultdict[str, dict[str, str]](dict)  # word -> family -> why
    for name in names:
        result = outcome(name)
        why = re.split(r"; decoding would|[;:] heads can", result.why.removeprefix(f"{name}: "))
        reasons[result.word][name] = why[0]
    text = (
        f"# Targets\n\nWritten by `python -m tests.targets` with transformers "
        f"{transformers.__version__}: every architecture of\n"
        "`AutoModelForCausalLM`, in miniature with random weights in float32.\n"
    )
    for word in (word for word in WORDS if reasons[word]):
        text += f"\n## {len(reasons[word])} {WORDS[word]}\n\n"
        if any(reasons[word].values()):
            rows = [f"| {name} | {why} |\n" for name, why in reasons[word].items()]
            text += "".join(["| | why |\n|---|---|\n", *rows])
        else:
            text += ", ".join(reasons[word]) + ".\n"
    return text


if __name__ == "__main__":
    print(table(sys.argv[1:] or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]), end="")
