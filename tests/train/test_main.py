"""The command: plans, refusals in one line, whole runs, their reuse, and what a later call makes of a stopped one."""

import json
import re
import shutil
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM

from aerie.configs.errors import exit_code
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.data import main as data_main
from aerie.data.cache import FeatureCache
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.methods import DRAFTERS, drafting
from aerie.model.checkpoint import head_facts, load_head, save_head
from aerie.model.storage import Stage
from aerie.model.target import Target, load_vocab
from aerie.train import jobs, losses, resume
from aerie.train import main as train_main
from tests import tiny
from tests.train.sittings import lines

ROOT = Path(__file__).resolve().parents[2]
LM = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}


class Killed(BaseException):  # nothing catches it
    pass


def dies(*_: Any, **__: Any) -> None:
    raise Killed


def call(module: Any, *words: object) -> int:
    """The exit code of a command run in this process."""
    before, sys.argv = sys.argv, ["main.py", *map(str, words)]
    try:
        return exit_code(module.main)
    finally:
        sys.argv = before
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def recipe_of(path: Path) -> Any:
    parser = train_main.argparse.ArgumentParser()
    train_main.add_arguments(parser)
    return train_main.load(*parser.parse_known_args(["--config", str(path)]))


def write_recipe(path: Path, root: Path, train: dict[str, Any], **sections: Any) -> Path:
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.3},
        "train": {"max_steps": 6, "batch_size": 8, "warmup_steps": 1, "log_every": 3, "eval_every": 3, **train},
        **sections,
    }
    return tiny.recipe(path, values)


def cached(root: Path, num_blocks: int, name: str, train: dict[str, Any], **sections: Any) -> Path:
    """The directory with a target, conversations, a recipe, and its feature cache."""
    tiny.target(root / "target", num_blocks=num_blocks)
    tiny.write_conversations(root / "train.jsonl", 60)
    recipe = write_recipe(root / f"{name}.yaml", root, train, tree={"levels": 4}, **sections)
    assert call(data_main, "features", "--config", recipe) == 0
    return root


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target, conversations, recipes of an EAGLE-1 head and a draft LM, and their feature cache."""
    root = tmp_path_factory.mktemp("made")
    # No token_weight: the target's random laws are not those of the conversations.
    train = {"distill": "kl", "token_weight": 0.0, "max_steps": 12, "learning_rate": 1e-2, "eval_every": 6}
    write_recipe(root / "draft_lm.yaml", root, train, head={"kind": "draft_lm", **LM})
    return cached(root, 4, "eagle1", {})


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for an EAGLE-3 head, with a target deep enough for the default taps."""
    train, head = {"unroll_steps": 3, "learning_rate": 1e-3}, {"kind": "eagle3", "draft_vocab_size": 160}
    return cached(tmp_path_factory.mktemp("deep"), 7, "eagle3", train, head=head)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> tuple[object, ...]:
    """The words of a short EAGLE-1 training in a run of its own, with the feature cache."""
    shutil.copytree(made / "run/features", tmp_path / "run/features")
    short = ("--train.max_steps", 3, "--train.eval_every", 0, "--train.save_every", 1)
    return ("--config", made / "eagle1.yaml", "--run", tmp_path / "run", *short)


def measured(run: Path) -> list[dict[str, Any]]:
    return [record for record in lines(run) if "held_out_loss" in record]


def vocab_of(root: Path) -> Any:
    return load_vocab(TargetConfig(str(root / "target"), dtype="float32"))[1]


def killed_at_its_end(*words: object) -> None:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Stage, "finish", dies)
        call(train_main, *words)


MISTAKES = [
    ("eagle1", "--train.unroll_steps 3", "train.unroll_steps: unknown key"),
    ("eagle1", "--run nowhere", "nowhere/features: no whole feature cache"),
    ("eagle1", "--data.max_length 64", "data.max_length: 128 there, 64 asked; rebuild with:"),
    ("eagle1", "--head.max_position_embeddings 100", "max_position_embeddings: 100 is less than data.max_length"),
    ("eagle1", "--head.init_from /no/head", "/no/head: no such head directory"),
    ("draft_lm", "--head.init_from OTHER", "choose a draft LM with the target's tokenizer"),
    ("draft_lm", "--train.on_policy 0.5", "train.on_policy: a cache has no states of tokens"),
    ("eagle3", "--target SHALLOW", "has 4 blocks, and the default taps .* need at least 7"),
    ("eagle3", "--features.after_blocks [1,3,4]", r"after_blocks: \[2, 3, 4\] there, \[1, 3, 4\] asked; rebuild"),
    ("eagle3", "--head.draft_vocab_size 400", "400 is larger than the target's vocabulary of 320"),
    ("eagle3", "--head.draft_vocab_size null --head.init_from ENDLESS", "none of the target's end-of-turn tokens"),
]


@pytest.mark.parametrize(("recipe", "words", "said"), MISTAKES, ids=lambda value: value)
def test_mistakes_get_one_line_and_code_2(
    made: Path, deep: Path, tmp_path: Path, capsys: Any, recipe: str, words: str, said: str
) -> None:
    root = deep if recipe == "eagle3" else made
    if "OTHER" in words:
        other = tiny.target(tmp_path / "other") / "tokenizer.json"
        other.write_text(other.read_text().replace("<|system|>", "<|tool|>"))
    if "ENDLESS" in words:
        endless = tiny.eagle3_head(vocab_of(deep).embedding, ids=torch.arange(100, 200), after_blocks=(2, 3, 4))
        save_head(endless, tmp_path / "endless")
    for name, path in (("OTHER", tmp_path / "other"), ("SHALLOW", made / "target"), ("ENDLESS", tmp_path / "endless")):
        words = words.replace(name, str(path))
    config = ("--config", root / f"{recipe}.yaml", "--output", tmp_path / "new")
    assert call(train_main, *config, "--plan", *words.split()) == 2
    error = capsys.readouterr().err
    assert re.search(said, error) and len(error.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists() and not Path("nowhere").exists()


def test_a_run_is_planned_trained_once_and_reused(made: Path, capsys: Any, monkeypatch: Any) -> None:
    recipe, head, status = made / "eagle1.yaml", made / "run/heads/eagle1", made / "run/status.json"
    before = sorted(made.rglob("*"))
    assert call(train_main, "--config", recipe, "--plan") == 0 and sorted(made.rglob("*")) == before
    out = capsys.readouterr().out
    assert "steps: 6 of 8 rows x 1 x 1 process" in out and "MiB with gradients and Adam" in out
    assert call(train_main, "--config", recipe, "--is-whole") == 1
    with monkeypatch.context() as patched:
        patched.setenv("WORLD_SIZE", "2")
        assert call(train_main, "--config", recipe) == 2
        assert "asked for 2 processes and 1 trains" in capsys.readouterr().err
    with monkeypatch.context() as patched:  # a scheduler stops the start-up
        patched.setattr(jobs, "build", lambda *_: signal.raise_signal(signal.SIGTERM))
        assert call(train_main, "--config", recipe) == 75
    assert json.loads(status.read_text()) == {"stage": "train", "state": "requeue", "code": 75}
    assert call(train_main, "--config", recipe) == 0
    record = json.loads((head / "provenance.json").read_text())
    assert (record["steps"], record["ended"]) == (6, "finished") and head_facts(head)["predicted_tau"] >= 1
    assert json.loads(status.read_text()) == {"stage": "train", "state": "done", "code": 0}
    assert [path.name for path in (made / "run/state/eagle1").iterdir()] == [".lock"]
    capsys.readouterr()
    assert call(train_main, "--config", recipe) == 0 and "train eagle1: whole, reused" in capsys.readouterr().out
    assert call(train_main, "--config", head / "recipe.yaml", "--train.keep_last", 1, "--is-whole") == 0
    written = (head / "model.safetensors").read_bytes()
    assert call(train_main, "--config", recipe, "--train.seed", "5") == 2
    assert "train.seed: 0 there, 5 asked" in capsys.readouterr().err
    assert (head / "model.safetensors").read_bytes() == written
    assert call(train_main, "--config", recipe, "--train.seed", "5", "--overwrite") == 0
    assert (head / "model.safetensors").read_bytes() != written
    code = "import sys; from aerie.train import main; main.main(); sys.exit('torch' in sys.modules)"
    asked = [sys.executable, "-c", code, "--config", str(recipe), "--is-whole"]
    assert subprocess.run(asked, cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "medusa", "hydra", "draft_lm"])
def test_all_kinds_train_with_at_most_eight_frames_to_a_loss(
    made: Path, deep: Path, tmp_path: Path, monkeypatch: Any, kind: str
) -> None:
    depths, originals = set(), list(losses.LOSSES.values())

    def counted(real: Any, *arguments: Any) -> Any:
        frames = [(Path(frame.filename).resolve(), frame.name) for frame in traceback.extract_stack()]
        below = frames[frames.index((ROOT / "train/main.py", "main")) :]
        ours = [path for path, name in below if path.is_relative_to(ROOT) and not name.startswith("<listcomp")]
        ours = [path for path in ours if not {"tests", ".venv"} & set(path.relative_to(ROOT).parts)]
        if torch.is_grad_enabled():  # not in an evaluation
            depths.add(1 + len(ours))
        return real(*arguments)

    for name in ("soft_cross_entropy", "kl", "acceptance", "negative_log_alpha"):  # what all losses end in
        monkeypatch.setattr(losses, name, partial(counted, getattr(losses, name)))
    every = lambda *arguments: sum(loss(*arguments) for loss in originals)  # noqa: E731
    monkeypatch.setitem(losses.LOSSES, "kl", every)
    recipe = deep / "eagle3.yaml" if kind == "eagle3" else made / f"{kind if kind == 'draft_lm' else 'eagle1'}.yaml"
    root, words = recipe.parent, ("--train.max_steps", 1, "--output", tmp_path / "head")
    if kind != "draft_lm":
        words += ("--head.kind", kind, "--train.loss", "kl", "--train.measure_prompts", 2)
    if kind in ("medusa", "hydra"):
        words += ("--tree.levels", "null", "--train.law_weight", 1)
    assert call(train_main, "--config", recipe, *words) == 0
    assert max(depths) == 8
    if kind != "draft_lm":
        assert load_head(tmp_path / "head", vocab=vocab_of(root)).kind == kind
        assert min(head_facts(tmp_path / "head")[name] for name in ("predicted_tau", "tau")) >= 1


def test_a_small_lm_learns_tokens_or_laws_cached_or_online(made: Path, tmp_path: Path) -> None:
    recipe, output = made / "draft_lm.yaml", made / "run/heads/draft_lm"
    alone = ("--train.distill", "null", "--train.token_weight", 1, "--data.supervise", "all", "--run", tmp_path / "lm")
    assert call(train_main, "--config", recipe, *alone) == 0
    found = [line["held_out_loss"] for line in measured(tmp_path / "lm")]
    assert found[-1] < found[0] and AutoModelForCausalLM.from_pretrained(tmp_path / "lm/heads/draft_lm")
    assert call(train_main, "--config", recipe) == 0
    held_out = [line for line in measured(made / "run") if line["kind"] == "draft_lm-kl"]
    assert held_out[-1]["held_out_distill"] < held_out[0]["held_out_distill"]
    lm = AutoModelForCausalLM.from_pretrained(output)
    online = ("--config", recipe, "--features.mode", "online")
    assert call(train_main, *online, "--run", tmp_path / "run") == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "run/heads/draft_lm")
    torch.testing.assert_close(again.lm_head.weight, lm.lm_head.weight, rtol=1e-3, atol=1e-4)
    for run in ("one", "two"):  # on tokens of its own, and again the same
        own = ("--train.distill", "jsd", "--train.on_policy", "0.5", "--head.init_from", output)
        assert call(train_main, *online, "--run", tmp_path / run, *own) == 0
    one, two = ((tmp_path / run / "heads/draft_lm/model.safetensors").read_bytes() for run in ("one", "two"))
    assert one == two


def test_eagle3_is_trained_from_the_cache_and_alike_online_or_packed(deep: Path, tmp_path: Path, capsys: Any) -> None:
    measuring = ("--train.measure_prompts", "3", "--train.measure_new_tokens", "12")
    words = ("--config", deep / "eagle3.yaml", *measuring)
    assert call(train_main, *words) == 0
    out = capsys.readouterr().out
    assert "draft vocabulary: 160 of 320 tokens cover" in out and "accuracy @1 " in out
    target = Target.load(TargetConfig(str(deep / "target"), dtype="float32"))
    facts, head = head_facts(deep / "run/heads/eagle3"), load_head(deep / "run/heads/eagle3", vocab=target.vocab)
    taus = {line["step"]: line["held_out_tau"] for line in measured(deep / "run")}
    assert set(taus) == {3, 6} and facts["tau"] == max(taus.values()) == taus[facts["step"]]
    drafter = DRAFTERS["eagle3"](head, target)
    decoder, cycles = SpeculativeDecoder(target, drafting(drafter, recipe_of(deep / "eagle3.yaml").tree)), [0, 0]
    for row in FeatureCache.open(deep / "run/features").split("held_out")[:3]:
        prompt = row.input_ids[None, : int(row.turns.nonzero()[0])]
        found = decoder.generate(prompt, max_new_tokens=12, do_sample=False).statistics
        cycles = [cycles[0] + sum(found.cycle_tokens), cycles[1] + len(found.cycle_tokens)]
    assert facts["tau"] == pytest.approx(cycles[0] / cycles[1])
    assert call(train_main, *words, "--run", tmp_path / "run", "--features.mode", "online") == 0
    for one, other in zip(measured(tmp_path / "run"), measured(deep / "run"), strict=True):
        assert one["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-4)
        assert one["held_out_predicted_tau"] == pytest.approx(other["held_out_predicted_tau"], rel=1e-3)
    assert call(train_main, *words, "--output", tmp_path / "packed", "--train.packing", "true", "--overwrite") == 0
    packed = load_head(tmp_path / "packed", vocab=target.vocab).fc.weight
    assert (packed - head.fc.weight).abs().max() < 1e-3 * packed.abs().max()


@pytest.mark.parametrize("changed", ["train.jsonl", "target/tokenizer.json"])
def test_a_cache_does_not_outlive_its_data_or_tokenizer(deep: Path, tmp_path: Path, capsys: Any, changed: str) -> None:
    file, words = deep / changed, ("--config", deep / "eagle3.yaml", "--output", tmp_path / "head")
    online, before = (*words, "--plan", "--features.mode", "online"), (deep / changed).read_text()
    assert call(train_main, *words, "--plan") == 0 and call(train_main, *online) == 0
    file.write_text(before.replace("boats", "ships") if changed == "train.jsonl" else before.replace("{", "{ ", 1))
    try:
        assert call(train_main, *words, "--plan") == 2
        error = capsys.readouterr().err
        assert f"{file.name} changed; rebuild with: python data/main.py features" in error
        assert call(train_main, *words, "--is-whole") == 1 and call(train_main, *online) == 0
    finally:
        file.write_text(before)


def test_a_warm_start_keeps_its_vocabulary(deep: Path, tmp_path: Path, capsys: Any) -> None:
    warm = tiny.eagle3_head(vocab_of(deep).embedding, ids=torch.arange(100), after_blocks=(2, 3, 4))
    save_head(warm, tmp_path / "warm")
    words = ("--config", deep / "eagle3.yaml", "--output", tmp_path / "new", "--head.draft_vocab_size", "null")
    assert call(train_main, *words, "--head.init_from", tmp_path / "warm", "--train.max_steps", "1") == 0
    stored = head_facts(tmp_path / "new")["draft_vocabulary"]
    assert stored["size"] == 100 and 0.0 < stored["coverage"] < 1.0
    odd = ("--output", tmp_path / "odd", "--head.rope_theta", "5e5", "--plan")
    assert call(train_main, *words, *odd) == 0
    assert "warning: head: rope_theta is 500,000 with scaling None, its target's 10,000" in capsys.readouterr().err


def test_foreign_files_stay_and_a_moved_run_goes_on(run: Any, tmp_path: Path, capsys: Any) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_text("precious")
    assert call(train_main, *run, "--output", foreign) == 2
    assert "files that no run has made" in capsys.readouterr().err
    assert (foreign / "model.safetensors").read_text() == "precious"
    assert call(train_main, *run, "--output", foreign, "--overwrite") == 0 and load_head(foreign)
    choosing = ("--train.measure_prompts", "1", "--train.measure_new_tokens", "4")
    killed_at_its_end(*run, *choosing)
    (tmp_path / "run").rename(tmp_path / "moved")
    words = [tmp_path / "moved" if word == tmp_path / "run" else word for word in (*run, *choosing)]
    assert call(train_main, *words, "--plan") == 0
    # Measured tau with the tree chooses the best weights; a cache of rounded states has the same rows.
    for key, value, said in (("tree.levels", 3, "4 there, 3 asked"), ("features.storage", "bf16", "[0-9a-f]+ there")):
        other = (*words, f"--{key}", value)
        assert call(data_main, "features", *other, "--overwrite") == 0 and call(train_main, *other) == 2
        refusal = rf"step 2 of another recipe or other data \({key.removesuffix('.storage')}: {said}"
        assert re.search(refusal, capsys.readouterr().err)


def test_a_kill_at_the_very_end_costs_no_training(run: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    killed_at_its_end(*run)
    head = tmp_path / "run/heads/eagle1"
    written = (head / "model.safetensors").read_bytes()
    assert not (head / "provenance.json").exists() and call(train_main, *run, "--is-whole") == 1
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(resume, "forget_saves", dies)
        call(train_main, *run)
    assert "going on from step 2 of 3" in capsys.readouterr().out
    assert call(train_main, *run) == 0 and "train eagle1: whole, reused" in capsys.readouterr().out
    assert (head / "model.safetensors").read_bytes() == written
    assert not list((tmp_path / "run/state/eagle1").glob("step-*"))


def test_a_run_that_its_budget_ended_goes_on_with_another(run: Any, tmp_path: Path, capsys: Any) -> None:
    assert call(train_main, *run, "--train.max_seconds", "0") == 0
    assert call(train_main, *run, "--train.max_seconds", "60", "--train.seed", "5") == 2
    assert "holds another train (train.max_seconds: 0.0 there, 60.0 asked; train.seed" in capsys.readouterr().err
    assert call(train_main, *run, "--train.max_seconds", "60") == 0
    assert "going on from step 1 of 3" in capsys.readouterr().out
    record = json.loads((tmp_path / "run/heads/eagle1/provenance.json").read_text())
    assert (record["ended"], record["steps"]) == ("finished", 3)
