"""The diagnosis: what is wrong with a head, said in the first sentence.

python -m tests.infer.test_diagnose > docs/causes.md
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from aerie.configs.schema.decode import ServedConfig
from aerie.infer import diagnose
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.loaded_heads import LoadedHeads
from aerie.infer.diagnose import text as texts
from aerie.infer.diagnose.ladder import chain_of
from aerie.infer.diagnose.patient import Patient
from aerie.infer.diagnose.verdict import IN_BRACES, read_rules
from aerie.infer.measure.server import Server
from aerie.model.export import export
from aerie.model.formats.content import TargetFacts
from aerie.model.heads.eagle import EMBEDDING, DraftVocabulary
from aerie.model.storage import ROOT, read_json
from tests import tiny
from tests.infer.clinic import Ward
from tests.infer.test_main import write_recipe
from tests.infer.test_served_rows import LEVELS, Chained
from tests.tiny import refused

SMALL = torch.arange(40)
OTHERS = torch.tensor([*range(10), *range(30, 320)])


class Fault(NamedTuple):
    name: str
    cause: str  # that the first sentence names
    make: Callable[[Ward], Patient]  # a patient who has it


def eagle3(name: str, **changes: Any) -> Callable[[Ward], Patient]:
    """An EAGLE-3 head whose files say something else."""
    return lambda ward: ward.patient(ward.broken(ward.head("eagle3"), name, **changes))


def eagle1(name: str, **changes: Any) -> Callable[[Ward], Patient]:
    return lambda ward: ward.patient(ward.broken(ward.head("eagle1"), name, **changes))


def published(name: str, layout: str, **values: Any) -> Callable[[Ward], Patient]:
    """A head in another program's layout, with values of its config.json changed."""

    def make(ward: Ward) -> Patient:
        kind = "eagle1" if layout == "safeailab" else "eagle3"
        out = ward.root / "exports" / name
        facts = TargetFacts.load(ward.target.recipe.path)
        export(ward.head(kind), layout, out, facts, pickled=False)
        return ward.patient(ward.broken(out, name, **values))

    return make


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def served(
    reads: Callable[[Ward], Path], kind: str = "eagle3", **facts: Any
) -> Callable[[Ward], Patient]:
    """A healthy head, and a server that drafts with it as another file has it."""

    def make(ward: Ward) -> Patient:
        draft = str(ward.head("draft_lm"))
        parts: Any = SimpleNamespace(
            target=ward.target, tokenizer=ward.tokenizer, draft=lambda seed: draft
        )
        server = Chained(parts)
        drafter = LoadedHeads(ward.target).of(str(reads(ward)))
        server.decoder = SpeculativeDecoder(ward.target, chain_of(drafter, LEVELS))
        vars(server).update(facts)
        ward.servers.append(server.__enter__())
        config = ServedConfig("served", server.url)
        return ward.patient(ward.root / "heads" / kind, server=Server(config, "--server"))

    return make


FAULTS = [
    Fault("all taps one low", "taps", eagle3("low", after_blocks=[0, 2])),
    Fault("all taps one high", "taps", eagle3("high", after_blocks=[2, 4])),
    Fault("the first tap one low", "taps", eagle3("first-low", after_blocks=[0, 3])),
    Fault("the first tap one high", "taps", eagle3("first-high", after_blocks=[2, 3])),
    Fault("the last tap one low", "taps", eagle3("last-low", after_blocks=[1, 2])),
    Fault("the last tap one high", "taps", eagle3("last-high", after_blocks=[1, 4])),
    Fault(
        "taps of a block head one low",
        "taps",
        lambda ward: ward.patient(ward.broken(ward.head("block"), "block", after_blocks=[0, 2])),
    ),
    Fault("the residual is normed", "norm", eagle3("residual", norm_before_residual=True)),
    Fault("the normed output is fed back", "norm", eagle3("output", norm_output=True)),
    Fault("RoPE's base", "RoPE", eagle3("rope", rope_theta=10_000.0)),
    Fault("RoPE's base of EAGLE-1", "RoPE", eagle1("rope1", rope_theta=10_000.0)),
    Fault(
        "another embedding",
        "embedding",
        eagle3("embedding", tensors=lambda tensors: {**tensors, EMBEDDING: noise(320, 64)}),
    ),
    Fault(
        "another LM head",
        "LM head",
        eagle3("lm-head", tensors=lambda tensors: {**tensors, "lm_head.weight": noise(320, 64)}),
    ),
    Fault(
        "d2t holds ids",
        "file",
        lambda ward: ward.patient(
            ward.broken(
                ward.head("eagle3", "even", vocabulary=torch.arange(0, 320, 2)),
                "ids",
                tensors=lambda tensors: {**tensors, "d2t": torch.arange(0, 320, 2)},
            )
        ),
    ),
    Fault(
        "the tables of another draft vocabulary",
        "draft ids",
        lambda ward: ward.patient(
            ward.broken(
                ward.head("eagle3", "first", vocabulary=torch.arange(300)),
                "tables",
                tensors=lambda tensors: {
                    **tensors,
                    **vars(DraftVocabulary.of_ids(OTHERS, 320)),
                },
            )
        ),
    ),
    Fault(
        "a bias that was not trained",
        "bias",
        eagle1(
            "bias",
            bias=True,
            tensors=lambda tensors: {**tensors, "fc.bias": 2 * torch.ones(64)},
        ),
    ),
    Fault(
        "features from before the final norm",
        "final norm",
        lambda ward: ward.patient(ward.head("eagle1", "before", before_norm=True)),
    ),
    Fault(
        "undertrained",
        "undertrained",
        lambda ward: ward.patient(ward.head("eagle1", "young", steps=5)),
    ),
    Fault(
        "a small draft vocabulary",
        "draft vocabulary",
        lambda ward: ward.patient(ward.head("eagle3", "small", vocabulary=SMALL)),
    ),
    Fault(
        "overfitted",
        "overfitted",
        lambda ward: ward.patient(ward.head("eagle1", "old", rows=4), trained_on=ward.rows[:4]),
    ),
    Fault(
        "SafeAILab's layout without RoPE's base",
        "RoPE",
        published("s", "safeailab", rope_theta=None, rope_parameters=None),
    ),
    Fault(
        "SGLang's numbers of taps",
        "taps",
        published(
            "g",
            "sglang",
            after_blocks=None,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2]},
        ),
    ),
    Fault(
        "speculators with vLLM's default",
        "norm",
        published("p", "speculators", norm_before_residual=True),
    ),
]
SERVED = [
    Fault(
        "a server with another tap",
        "server reading",
        served(lambda ward: ward.broken(ward.head("eagle3"), "served", after_blocks=[0, 2])),
    ),
    Fault(
        "a server that drops the bias",
        "server reading",
        served(
            lambda ward: ward.broken(
                ward.head("eagle1", "biased", bias=True),
                "unbiased",
                bias=False,
                tensors=lambda tensors: {k: v for k, v in tensors.items() if k != "fc.bias"},
            ),
            "biased",
        ),
    ),
    Fault(
        "a server's count",
        "server's count",
        served(lambda ward: ward.head("eagle1"), "eagle1", counts_bonus=True),
    ),
    Fault("a healthy server", "healthy", served(lambda ward: ward.head("eagle3"))),
]
HEALTHY = ["eagle1", "eagle3", "medusa", "block", "draft_lm"]
QUICK = {  # the others take a head of their own, or are like one of these
    "all taps one low",
    "the residual is normed",
    "RoPE's base",
    "another embedding",
    "another LM head",
    "a bias that was not trained",
    "undertrained",
    "SGLang's numbers of taps",
    "a server with another tap",
    "eagle1",
    "eagle3",
}


def marked(value: Any, name: str) -> Any:
    return pytest.param(value, id=name, marks=[] if name in QUICK else [pytest.mark.slow])


@pytest.fixture(scope="module")
def ward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ward]:
    """The same answers to the same prompts are decoded once."""
    answers: dict[str, Any] = {}
    decode = diagnose.answer_greedily

    def remembered(target: Any, prompts: Any, *most: int) -> Any:
        key = f"{id(target)} {prompts} {most}"
        if key not in answers:
            answers[key] = decode(target, prompts, *most)
        return answers[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diagnose, "answer_greedily", remembered)
        patch.setattr(texts, "answer_greedily", remembered)
        ward = Ward(tmp_path_factory.mktemp("ward"))
        yield ward
        for server in ward.servers:
            server.__exit__()


@pytest.mark.parametrize("fault", [marked(fault, fault.name) for fault in (*FAULTS, *SERVED)])
def test_the_first_sentence_names_the_cause(ward: Ward, fault: Fault) -> None:
    diagnosis = diagnose.examine(fault.make(ward))
    assert diagnosis.cause == fault.cause, diagnosis.sentence


def test_a_head_is_mended(ward: Ward, tmp_path: Path) -> None:
    """The head that is written is the one that was broken, bit for bit."""
    head = ward.head("eagle3")
    patient = ward.patient(ward.broken(head, "to-mend", after_blocks=[0, 2]))
    refused("no other reading", patient.mend, tmp_path / "mended")
    assert diagnose.examine(patient).cause == "taps"
    patient.mend(tmp_path / "mended")
    mended = ward.patient(tmp_path / "mended").module
    assert mended.config == ward.patient(head).module.config
    weights = mended.state_dict()
    for name, tensor in ward.patient(head).module.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("kind", [marked(kind, kind) for kind in HEALTHY])
def test_a_healthy_head_is_not_called_ill(ward: Ward, kind: str) -> None:
    diagnosis = diagnose.examine(ward.patient(ward.head(kind), trained_on=ward.rows[:16]))
    assert diagnosis.cause == "healthy", diagnosis.sentence


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("diagnose")
    write_recipe(root)
    asked = "".join(f"Please count {number} boats.\n" for number in range(2, 6))
    (root / "asked.txt").write_text(f"{asked}{'boats ' * 2000}\n")
    return root


def test_it_is_said_on_a_page_in_a_file_and_in_the_report(world: Path, capsys: Any) -> None:
    tiny.session(
        """
        aerie diagnose --target {root}/target --head {root}/run/heads/eagle3
            exit 2
            error: diagnose needs --config RECIPE, or --target, --head and --prompts FILE
        aerie diagnose --config {root}/recipe.yaml --prompts {root}/none.jsonl
            exit 2
            none.jsonl: no such file of prompts
        aerie bench --config {root}/recipe.yaml --bench.sampling '[{{}}]'
        aerie diagnose --config {root}/recipe.yaml
            exit 2
            diagnose needs at least 4 prompts, not 2
        aerie diagnose --config {root}/recipe.yaml --num-prompts 1
            exit 2
            --num-prompts must be at least 4, not
        aerie diagnose --config {root}/recipe.yaml --prompts {root}/asked.txt
            undertrained: none of the other causes was seen
            chain, decoded here
        aerie report --config {root}/recipe.yaml
        """,
        capsys,
        root=world,
    )
    found = read_json(world / "run" / "diagnose.json")
    assert found["cause"] == "undertrained"
    assert "1 of 5 are longer" in found["absent"]["prompts"]
    assert found["figures"]["ladder.chain.tau"]["prompts"] == 4
    report = (world / "run" / "report" / "index.html").read_text(encoding="utf-8")
    assert "Why the head is accepted as it is" in report and "chain, decoded here" in report


def page() -> str:
    """docs/causes.md."""
    lines = [
        "# Causes of low acceptance",
        "",
        "The rules of `infer/diagnose/verdict.yaml`, by `python -m tests.infer.test_diagnose > "
        "docs/causes.md`. The verdict of",
        "[aerie diagnose](diagnose.md) is the first cause whose evidence is complete.",
        "",
        "| cause | evidence | what to do |",
        "|---|---|---|",
    ]
    for rule in read_rules():
        cells = f"| {rule.cause} | {rule.says} | {rule.fix} |"
        lines.append(IN_BRACES.sub(r"`\1`", cells))
    return "\n".join(lines) + "\n"


def test_the_page_of_causes_is_that_of_the_rules() -> None:
    assert (ROOT / "docs/causes.md").read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    print(page(), end="")
