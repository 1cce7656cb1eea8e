"""What of a gap in acceptance is the text's, the draft vocabulary's and the head's.

And a clinic of heads that nothing ails but their template, text, temperature or target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from aerie.configs.schema.heads import TargetConfig
from aerie.infer.diagnose import examine
from aerie.infer.diagnose.answers import LearntText
from aerie.infer.diagnose.patient import Patient
from aerie.infer.diagnose.text import GAP, compare_texts, length_figures, template_variants
from aerie.model.checkpoint import save_head
from aerie.model.target import Target
from tests import tiny
from tests.infer.test_main import write_recipe
from tests.infer.text_ward import AT_ONCE, Ward, learnt, prompts, quantised

ACCEPT = "accept_0"


def places(
    seed: int, hardness: float, skill: float = 1.0, outside: float = 0.0, first_row: int = 0
) -> pd.DataFrame:
    """40 texts of 30 places. A head accepts skill * exp(-entropy), and nothing outside."""
    generator = np.random.default_rng(seed)
    entropy = generator.exponential(hardness, 1200)
    inside = generator.random(1200) >= outside
    accepted = inside & (generator.random(1200) < skill * np.exp(-entropy))
    return pd.DataFrame(
        {
            "row": first_row + np.arange(1200) // 30,
            "length": 10 + np.arange(1200) % 30,
            "entropy": entropy,
            "inside": inside,
            ACCEPT: accepted.astype(float),
        }
    )


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("text", {"hardness": 1.5}),
        ("head", {"skill": 0.6}),
        ("vocabulary", {"outside": 0.4}),
    ],
)
def test_the_gap_is_that_parts_alone(part: str, changes: dict[str, float]) -> None:
    worse = places(**{"seed": 1, "hardness": 0.5, "first_row": 40, **changes})  # type: ignore[arg-type]
    gap = compare_texts(places(0, 0.5), worse, ACCEPT)
    assert gap["total"].value == pytest.approx(sum(gap[name].value for name in GAP[1:]))
    for name in GAP[1:]:
        assert (gap[name].low > 0.1) == (name == part)
        assert gap[name].high > 0.1 or abs(gap[name].value) < 0.06
    assert gap["total"].prompts == 80  # no pairs


def test_pairs_of_one_text_have_narrower_intervals() -> None:
    table = places(0, 0.5)
    worse = table.assign(**{ACCEPT: table[ACCEPT] * (np.arange(len(table)) % 3 > 0)})
    paired = compare_texts(table, worse, ACCEPT)["total"]
    unpaired = compare_texts(table, worse.assign(row=worse.row + 40), ACCEPT)["total"]
    assert paired.value == pytest.approx(unpaired.value)
    assert paired.high - paired.low < 0.8 * (unpaired.high - unpaired.low)


def test_the_length_at_which_acceptance_falls() -> None:
    table = places(0, 0.5)
    assert length_figures(table, ACCEPT)["loss"].low < 0.05
    table[ACCEPT] *= (table.length < 32) | (np.arange(len(table)) % 2 == 0)
    fall = length_figures(table, ACCEPT)
    assert fall["at"] == 32 and fall["loss"].low > 0.15
    assert length_figures(table[:20], ACCEPT) == {}


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa", "hydra", "block", "draft_lm"])
def test_the_laws_accept_what_training_counts(kind: str, tmp_path: Path) -> None:
    target = Target.load(TargetConfig(str(tiny.target(tmp_path / "target")), dtype="float32"))
    head = tmp_path / kind
    if kind == "eagle1":
        save_head(tiny.head(target.vocab.embedding, scale=8.0), head)
    elif kind == "eagle3":
        save_head(tiny.eagle3_head(target.vocab.embedding, torch.arange(200), scale=8.0), head)
    elif kind == "draft_lm":
        tiny.target(head, seed=1, num_blocks=1)
    else:
        save_head(tiny.multi_token_head(kind, target.vocab, noise=0.05), head)
    generator = torch.Generator().manual_seed(0)
    texts = []
    for length in (9, 30):
        turn_ids = torch.tensor([0, 0, 1]).repeat_interleave(length)
        turn_ids[2] = 0 if length == 9 else 1  # a second answer, too short for a draft
        texts.append(
            LearntText(torch.randint(5, 300, (3 * length,), generator=generator), turn_ids)
        )
    patient = Patient(target, tiny.tokenizer(), str(head), ())
    counted = patient.teacher_forced(texts).table
    scored = patient.scored(texts)
    assert len(scored) == counted.tries_1.sum() == 8 + 29
    assert scored.accept_0.sum() == counted.hits_1.sum()
    if kind == "eagle3":
        assert not scored.inside.all() and not scored.accept_0[~scored.inside].any()
    else:
        assert scored.inside.all()


def test_all_switches_for_thinking_are_turned_at_once(tmp_path: Path) -> None:
    target = Target.load(TargetConfig(str(tiny.target(tmp_path / "target")), dtype="float32"))
    save_head(tiny.head(target.vocab.embedding), tmp_path / "head")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template += "{{ 'a' if enable_thinking }}{{ 'b' if thinking }}"
    patient = Patient(target, tokenizer, str(tmp_path / "head"), prompts(1))
    variants = template_variants(patient)
    assert tokenizer.decode(variants["with thinking"][0]).endswith("ab")
    assert "without thinking" not in variants  # it is what is served


def test_mistakes_are_told_before_anything_is_measured(tmp_path: Path, capsys: Any) -> None:
    write_recipe(tmp_path)
    tiny.session(
        """
        aerie diagnose --config {root}/recipe.yaml --trained-target {root}/none
            exit 2
            none: no such
        aerie diagnose --config {root}/recipe.yaml --temperature -1
            exit 2
            temperature
        aerie diagnose {given} --prompts {root}/q.txt --target.chat_templat x
            exit 2
            did you mean 'chat_template'?
        """,
        capsys,
        root=tmp_path,
        given=f"--target {tmp_path}/target --head {tmp_path}/run/heads/eagle1",
        never="answers:",
    )


# --- the clinic -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    cause: str
    head: str  # of the ward: what it has learnt
    thinking: bool = False  # served with it
    other_language: bool = False
    long: bool = False
    trained_on: bool = False  # the training text is known
    count: int = 12  # of prompts
    changes: Callable[[Ward, Path], dict[str, Any]] = lambda ward, directory: {}  # to the patient


def other_target(ward: Ward, directory: Path) -> dict[str, Any]:
    """The head's files say where the one of its training is."""
    return {"target": ward.fine_tuned()}


def quantised_target(ward: Ward, directory: Path) -> dict[str, Any]:
    path = ward.target.recipe.path
    return {"target": quantised(ward.target, directory / "fp8"), "trained_target": path}


def flattened(ward: Ward, directory: Path) -> dict[str, Any]:
    """The head's choices stay, its probabilities do not."""
    weights = ward.directory / "at once/model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] *= 0.2
    directory = ward.directory / "flat"
    directory.mkdir()
    (directory / "config.json").write_bytes(weights.with_name("config.json").read_bytes())
    save_file(tensors, directory / weights.name)
    return {"head": str(directory), "temperature": 1.0}


CASES = {
    "healthy": Case("healthy", "at once", trained_on=True),
    "healthy, sampled": Case("healthy", "at once", changes=lambda *_: {"temperature": 1.0}),
    "healthy, long": Case("healthy", "all", long=True),
    "healthy, another language": Case("healthy", "all", other_language=True),
    "template": Case("template", "arguments recorded", thinking=True),
    "thinking": Case("thinking", "at once", thinking=True),
    "BOS": Case("BOS", "twice BOS"),
    "temperature": Case("temperature", "at once", changes=flattened),
    "long context": Case("long context", "at once", long=True, trained_on=True, count=32),
    "another language": Case("other text", "at once", other_language=True, trained_on=True),
    "fine-tuned target": Case("other target", "at once", changes=other_target),
    "quantised target": Case("quantised target", "at once", changes=quantised_target, count=32),
}


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Ward:
    made = Ward(tmp_path_factory.mktemp("ward"))
    made.head("at once", made.at_once)
    made.head("twice BOS", made.twice_bos)
    made.head("all", made.all, steps=240)
    made.record("at once", "arguments recorded", template_arguments=AT_ONCE)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_first_sentence_names_what_is_not_the_heads_fault(
    ward: Ward, name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    values = {
        "target": ward.target,
        "tokenizer": ward.tokenizers[case.thinking],
        "head": str(ward.directory / case.head),
        "prompts": prompts(case.count, case.other_language, case.long),
        "trained_on": learnt(ward.at_once) if case.trained_on else (),
        **case.changes(ward, tmp_path),
    }
    diagnosis = examine(Patient(**values))
    assert diagnosis.cause == case.cause, diagnosis.sentence
