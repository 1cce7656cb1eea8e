"""Every suite of configs/bench runs to its end, on miniatures with quirks of real models."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import yaml
from transformers import AutoConfig, GenerationConfig

from aerie.configs.read import as_dict
from aerie.configs.schema.decode import METHODS
from aerie.configs.schema.heads import TargetConfig
from aerie.infer import main as infer
from aerie.infer.decode.calibrator import Calibrator
from aerie.infer.measure.agreement import first_difference
from aerie.infer.measure.bench_files import read_records
from aerie.model.checkpoint import save_head
from aerie.model.miniature import small_model
from aerie.model.storage import ROOT, digests, write_json
from aerie.model.target import Target
from tests import tiny
from tests.infer.draws import make_head

SUITES = sorted(ROOT.glob("configs/bench/*.yaml"))
LONG = ("deagle", "seeds", "seeds-full", "svip-qwq", "svip-mtbench")


class Miniatures:
    """Model name -> directory of a miniature target, draft or head."""

    def __init__(self, root: Path) -> None:
        self.root, self.made = root, dict[tuple[str, str], str]()

    def of(self, name: str, target: str = "") -> str:
        """The directory for a target or draft, or for a head of a target."""
        kinds = ("eagle3", "eagle1", "medusa", "hydra", "block")
        kind = next((kind for kind in kinds if kind.removesuffix("1") in name.lower()), None)
        key = (kind or name, target if kind else "")
        if key not in self.made:
            place = self.root / f"made-{len(self.made)}"
            self.made[key] = str(place)
            self._head(kind, target, place) if kind else self._target(name, place)
        return self.made[key]

    def _target(self, name: str, place: Path) -> None:
        tokenizer = tiny.tokenizer(chat_template=None if "vicuna" in name else tiny.TEMPLATE)
        if "Llama-3" in name:  # its own special tokens; two of them end an answer
            words = ["<|begin_of_text|>", "<|eot_id|>"]
            tokenizer.add_special_tokens(
                {"additional_special_tokens": words, "bos_token": words[0]}
            )
            tokenizer.chat_template = "{{ bos_token }}" + tiny.TEMPLATE
        if "vicuna" in name:
            tokenizer.add_special_tokens({"bos_token": "<s>"})
        if name.split("/")[-1].startswith(
            "Q"
        ):  # Qwen2.5, QwQ: padded vocabularies of two sizes, repetition penalty
            rows = 151_936 if any(size in name for size in ("0.5B", "1.5B", "3B")) else 152_064
            model: Any = small_model(AutoConfig.for_model("qwen2"), vocab_size=rows, hidden_size=16)
            settings = {
                "repetition_penalty": 1.05,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
                "do_sample": True,
            }
            ends = {
                "eos_token_id": [tokenizer.eos_token_id, 151_643],
                "pad_token_id": tokenizer.pad_token_id,
            }
            model.generation_config = GenerationConfig(**settings, **ends)
        else:
            grouped = (
                {"num_attention_heads": 8, "num_key_value_heads": 1}
                if "70b" in name.lower()
                else {}
            )
            model = tiny.llama(
                vocab_size=len(tokenizer) + 8, **grouped
            )  # rows beyond the tokenizer's
            if "Llama-3" in name:
                model.generation_config.eos_token_id = [tokenizer.eos_token_id, len(tokenizer) - 1]
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)

    def _head(self, kind: str, target: str, place: Path) -> None:
        save_head(
            make_head(Target.load(TargetConfig(self.of(target), dtype="float32")), kind), place
        )
        calibrator = Calibrator(1.0, (0.0, 1.0), (0.0, 1.0), head=digests(place))
        write_json(place / "calibrator.json", as_dict(calibrator))


def small(path: Path, made: Miniatures, target: str | None) -> Path:
    """The suite with miniatures for its models, one question per task and five new tokens."""
    values = yaml.safe_load(path.read_text())
    root, named = made.root, target or values["target"]["path"]
    values["target"]["path"] = made.of(named)
    values["target"].pop("device_map", None)
    values["run"] = str(root / f"run-{path.stem}-{Path(named).name}")
    section = values.get("bench") or values["calibrate"]
    prompts = section["prompts"]
    prompts |= {"max_new_tokens": 5, "num_prompts": 1}
    question = {
        "question_id": 1,
        "turns": ["Please count 4 boats.", "Please sort 9 owls."],
        "level": 3,
        "category": "count",
    }
    questions = str(tiny.write_rows(root / "questions.jsonl", [question]))
    if "tasks" in prompts:
        prompts["tasks"] = [{"name": task["name"], "path": questions} for task in prompts["tasks"]]
    else:
        prompts["path"] = questions

    def with_heads(row: dict[str, Any]) -> dict[str, Any]:
        kinds = METHODS[row.get("method", "deagle")].heads
        if not kinds:
            return row
        usual = f"{named}-1.5B" if kinds == ("draft_lm",) else kinds[0]
        return {**row, "head": made.of(row.get("head") or usual, named)}

    if "calibrate" in values and "bench" not in values:
        section["oracle_levels"] = 6
        values["head"]["init_from"] = made.of(values["head"]["init_from"])
    for rows in [section, *section.get("sweeps", ())]:
        rows |= {"rows": [with_heads(row) for row in rows["rows"]]} if "rows" in rows else {}
    for sweep in section.get("sweeps", ()):
        if sweep["vary"] == "head":
            sweep["values"] = [made.of(name, named) for name in sweep["values"]]
    return tiny.recipe(root / f"{path.stem}.yaml", values)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Miniatures:
    return Miniatures(tmp_path_factory.mktemp("suites"))


CASES = [
    *(
        pytest.param(path, None, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LONG))
        for path in SUITES
    ),
    pytest.param(
        ROOT / "configs/bench/eagle2-t2.yaml",
        "meta-llama/Llama-2-70b-chat-hf",
        id="eagle2-t2-llama2-70b",
    ),
]


@pytest.mark.parametrize(("path", "target"), CASES)
def test_suite(path: Path, target: str | None, made: Miniatures, capsys: Any) -> None:
    """A suite of configs/bench runs to its end."""
    recipe = small(path, made, target)
    values = yaml.safe_load(recipe.read_text())
    run = Path(values["run"])
    if "bench" not in values:
        assert (
            tiny.call(infer, "calibrate", "--config", recipe, "--head", values["head"]["init_from"])
            == 0
        )
        assert pd.read_parquet(run / "calibration" / "cycles.parquet").oracle.notna().any()
        return
    assert tiny.call(infer, "bench", "--config", recipe) == 0, capsys.readouterr().err
    records = read_records(run / "bench" / "records.jsonl")
    assert {record.status for record in records} == {"ok"}, [record.message for record in records][
        :1
    ]
    assert {record.row for record in records} >= set(range(len(values["bench"]["rows"])))
    for record in records:
        assert record.identical is not False or (
            record.margin is not None and record.margin <= 1.0
        ), (
            record.method,
            record.margin,
        )
    assert tiny.call(infer, "claims", run) == 0


def test_near_tie() -> None:
    """In 16 bits a near-tie is rounding, and any other difference is not."""
    model, ids = tiny.llama(), torch.tensor([[7, 9, 11, 23]])
    with torch.no_grad():
        order = model(ids).logits[0, -1].argsort(descending=True).tolist()
        best, twin, worst = order[0], order[1], order[-1]
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    target = Target(model.bfloat16(), TargetConfig("tiny", dtype="bfloat16"))
    margins = [
        first_difference(target, ids, 0, ours, [best, 5]).margin for ours in ([twin], [worst], [])
    ]
    assert margins[0] <= 1 < margins[1] < margins[2] == float("inf")
