"""The command: plans, errors in one line, whole runs, their reuse, and how a later call continues a
stopped one."""

import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from aerie.configs.schema.heads import TargetConfig
from aerie.data import main as data_main
from aerie.data.feature_cache import FeatureCache
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import tree_proposer
from aerie.model.checkpoint import head_facts, load_head, save_head
from aerie.model.heads import DRAFT_MODELS
from aerie.model.storage import ROOT, WEIGHTS, Stage
from aerie.model.target import Target, load_vocab
from aerie.train import jobs, resume
from aerie.train import main as train_main
from tests import tiny
from tests.configs.test_recipes import load
from tests.train.sittings import killed_at, lines

TAPS = (2, 3, 4)  # the default for seven blocks
LM = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def write_recipe(path: Path, root: Path, train: dict[str, Any], **sections: Any) -> Path:
    values = {
        "run": str(root / "run"),
        "threads": 1,
        "target": {"path": str(root / "target"), "dtype": "float32"},
        "data": {"conversations": [str(root / "train.jsonl")], "max_length": 128, "held_out": 0.3},
        "train": {
            "max_steps": 6,
            "batch_size": 8,
            "warmup_steps": 1,
            "log_every": 3,
            "eval_every": 3,
            **train,
        },
        **sections,
    }
    return tiny.recipe(path, values)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, a target deep enough for the default taps, recipes by kind of head, and two
    feature caches."""
    root = tmp_path_factory.mktemp("made")
    tiny.target(root / "target", num_blocks=7)
    tiny.write_conversations(root / "train.jsonl", 60)
    # No token_weight: the random target's laws do not fit the conversations.
    laws = {
        "distill": "kl",
        "token_weight": 0.0,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "eval_every": 6,
    }
    write_recipe(root / "draft_lm.yaml", root, laws, head={"kind": "draft_lm", **LM})
    heads: list[dict[str, Any]] = [{"kind": "eagle1"}, {"kind": "eagle3", "draft_vocab_size": 160}]
    for head, run, train in zip(
        heads, ("run", "deep"), ({}, {"unroll_steps": 3, "learning_rate": 1e-3}), strict=True
    ):
        sections = {"run": str(root / run), "head": head, "tree": {"levels": 4}}
        recipe = write_recipe(root / f"{head['kind']}.yaml", root, train, **sections)
        assert tiny.call(data_main, "features", "--config", recipe) == 0
    return root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> partial[int]:
    """A short EAGLE-1 training in a run of its own, with the feature cache."""
    shutil.copytree(made / "run/features", tmp_path / "run/features")
    short = ("--train.max_steps", 3, "--train.eval_every", 0, "--train.save_every", 1)
    return partial(
        tiny.call, train_main, "--config", made / "eagle1.yaml", "--run", tmp_path / "run", *short
    )


def measured(run: Path) -> list[dict[str, Any]]:
    return [record for record in lines(run) if "held_out_loss" in record]


def vocab_of(root: Path) -> Any:
    return load_vocab(TargetConfig(str(root / "target"), dtype="float32"))[1]


BLOCK = "--features.mode online --head.kind block"


@pytest.mark.parametrize(
    ("recipe", "words", "said"),
    [
        ("eagle1", "--train.unroll_steps 3", "train.unroll_steps: unknown key"),
        ("eagle1", "--run nowhere", "nowhere/features: is not a whole feature cache"),
        ("eagle1", "--data.max_length 64", "data.max_length: 128 before, 64 now; rebuild with:"),
        (
            "eagle1",
            "--head.max_position_embeddings 100",
            "max_position_embeddings: 100 is less than data.max_length",
        ),
        ("eagle1", "--head.init_from /no/head", "/no/head: holds no head"),
        (
            "eagle1",
            "--train.trackers [tensorbord]",
            "train.trackers.0: unknown 'tensorbord'; did you mean 'tensorboard'?",
        ),
        (
            "eagle1",
            "--train.trackers [tensorboard,dvclive]",
            "dvclive is not installed; run: pip install dvclive",
        ),
        ("draft_lm", "--head.init_from OTHER", "choose a draft LM with the target's tokenizer"),
        (
            "eagle3",
            "--head.draft_vocab_size 400",
            "400 is larger than the target's vocabulary of 320",
        ),
        (
            "eagle3",
            "--head.draft_vocab_size null --head.init_from ENDLESS",
            "none of the target's end-of-turn tokens",
        ),
        (
            "eagle3",
            "--head.norm_init target --head.init_from ENDLESS",
            "so it cannot start from others; set norm_init: ones",
        ),
        (
            "eagle3",
            "--train.optimizer muon",
            "train.optimizer: has keys of its own, indented below it, not 'muon'",
        ),
        (
            "eagle3",
            "--train.scale_rates.steps 9 --train.scale_rates.power 2",
            "power: input should be less than or equal",
        ),
        (
            "eagle3",
            "--head.fc_norm true --head.norm_before_fc true",
            "no server does both; set one of them",
        ),
        (
            "eagle3",
            "--head.hidden_size 16 --head.lm_head frozen",
            "head.lm_head: TARGET is 32 wide, the head 16; leave",
        ),
        (
            "eagle1",
            f"{BLOCK} --head.block_size 300",
            "head.block_size: 300 is beyond TARGET's context, 256",
        ),
        (
            "eagle1",
            f"{BLOCK} --head.block_size 6 --tree.levels 6",
            "tree: is 6 levels deep, and the head drafts at most 5",
        ),
        (
            "eagle1",
            f"{BLOCK} --head.mask_token_id 320",
            "head.mask_token_id: 320 is beyond TARGET's last token, 319",
        ),
        (
            "eagle1",
            f"{BLOCK} --features.after_blocks [2,9]",
            "features.after_blocks: 9 is no tap of TARGET",
        ),
        ("eagle1", f"{BLOCK} --features.after_blocks []", "head block needs at least one tap"),
        (
            "eagle1",
            f"{BLOCK} --features.after_blocks [1,2] --head.init_from FIVE",
            "head.block_size: the recipe has 8, but ",
        ),
        (
            "eagle3",
            "--head.hidden_size 16 --head.fc_init highest_tap",
            "head.fc_init: TARGET is 32 wide, the head 16",
        ),
    ],
    ids=lambda value: value,
)
def test_mistakes(
    made: Path, tmp_path: Path, capsys: Any, recipe: str, words: str, said: str
) -> None:
    """Mistakes get one line and code 2."""
    other = tiny.target(tmp_path / "OTHER") / "tokenizer.json"
    other.write_text(other.read_text().replace("<|system|>", "<|tool|>"))
    save_head(
        tiny.eagle3_head(vocab_of(made).embedding, torch.arange(9, 99), after_blocks=TAPS),
        tmp_path / "ENDLESS",
    )
    save_head(tiny.multi_token_head("block", vocab_of(made), block_size=5), tmp_path / "FIVE")
    words = re.sub("OTHER|ENDLESS|FIVE", lambda name: str(tmp_path / name[0]), words)
    config = ("--config", made / f"{recipe}.yaml", "--output", tmp_path / "new")
    assert tiny.call(train_main, *config, "--plan", *words.split()) == 2
    error = capsys.readouterr().err
    assert (
        said.replace("TARGET", str(made / "target")) in error
        and len(error.strip().splitlines()) == 1
    )
    assert not (tmp_path / "new").exists() and not Path("nowhere").exists()


def test_planned_trained_reused(made: Path, capsys: Any, monkeypatch: Any) -> None:
    """A run is planned, trained once and reused."""
    names = {"made": made, "train": f"aerie train --config {made}/eagle1.yaml"}
    names["weights"] = made / "run/heads/eagle1/model.safetensors"
    before = sorted(made.rglob("*"))
    plan = """
    {train} --plan
        steps: 6 of 8 rows x 1 x 1 process
        operations an epoch (head
        MiB a process in bf16
    {train} --is-whole
        exit 1
    """
    tiny.session(plan, capsys, **names)
    assert sorted(made.rglob("*")) == before
    with monkeypatch.context() as patched:
        patched.setenv("WORLD_SIZE", "2")
        other = "{train}\n exit 2\n asked for 2 processes, but 1 trains"
        tiny.session(other, capsys, **names)
    with monkeypatch.context() as patched:  # a scheduler stops it during start-up
        patched.setattr(jobs, "build_job", lambda *_: signal.raise_signal(signal.SIGTERM))
        tiny.session("{train}\n exit 75", capsys, **names)
    trained = """
    grep requeue {made}/run/status.json
    {train}
    cat {made}/run/status.json
        "stage": "train"
        "state": "done"
        "code": 0
    ls -A {made}/run/state/eagle1 | xargs test .lock =
    {train}
        train eagle1: whole, reused
    aerie train --config {made}/run/heads/eagle1/recipe.yaml --train.keep_last 1 --is-whole
    cp {weights} {made}/kept
    {train} --train.seed 5
        exit 2
        train.seed: 0 before, 5 now
    cmp {weights} {made}/kept
    truncate -s 1000 {weights}
    {train}
        exit 2
        model.safetensors: 1,000 bytes instead of
    {train} --train.seed 5 --overwrite
    cmp --silent {weights} {made}/kept
        exit 1
    """
    tiny.session(trained, capsys, **names)
    code = "import sys; from aerie.train import main; main.main(); sys.exit('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "--config", str(made / "eagle1.yaml"), "--is-whole"]
    subprocess.run(words, cwd=ROOT, timeout=60, check=True)


MEASURED = "--train.loss kl --train.measure_prompts 2 --head.kind"
SHALLOW = "--tree.levels null --train.law_weight 1"
ONLINE = "--features.mode online --features.after_blocks [1,2] --head.block_size 4"


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("eagle1", f"{MEASURED} eagle1"),
        ("eagle3", f"{MEASURED} eagle3"),
        ("eagle1", f"{MEASURED} medusa {SHALLOW}"),
        ("eagle1", f"{MEASURED} hydra {SHALLOW}"),
        ("eagle1", f"{MEASURED} block {ONLINE}"),  # its default depth is cut
        ("draft_lm", ""),
    ],
)
def test_every_kind(made: Path, tmp_path: Path, recipe: str, words: str, capsys: Any) -> None:
    """Every kind of head trains, is measured and is saved."""
    config = f"--config {made}/{recipe}.yaml --output {tmp_path}/head"
    tiny.session(f"aerie train {config} --train.max_steps 1 {words}", capsys)
    facts = head_facts(tmp_path / "head") if words else {"predicted_tau": 1, "tau": 1}
    assert min(facts["predicted_tau"], facts["tau"]) >= 1


def test_small_lm(made: Path, tmp_path: Path) -> None:
    """A small lm learns tokens or laws."""
    train = partial(tiny.call, train_main, "--config", made / "draft_lm.yaml")
    alone = ("--train.distill", "null", "--train.token_weight", 1, "--data.supervise", "all")
    assert train("--run", tmp_path / "lm", *alone) == 0 and train() == 0
    for run, loss in ((tmp_path / "lm", "held_out_loss"), (made / "run", "held_out_distill")):
        found = [
            line[loss]
            for line in measured(run)
            if loss in line and line["kind"].startswith("draft_lm")
        ]
        assert found[-1] < found[0]


def test_eagle3_cached_online_packed(made: Path, tmp_path: Path, capsys: Any) -> None:
    """Eagle3 is trained from the cache and alike online and packed."""
    measuring = ("--train.measure_prompts", 3, "--train.measure_new_tokens", 12)
    train = partial(tiny.call, train_main, "--config", made / "eagle3.yaml", *measuring)
    assert train() == 0 and "draft vocabulary: 160 of 320 tokens cover" in capsys.readouterr().out
    target = Target.load(TargetConfig(str(made / "target"), dtype="float32"))
    facts, head = (
        head_facts(made / "deep/heads/eagle3"),
        load_head(made / "deep/heads/eagle3", vocab=target.vocab),
    )
    taus = {line["step"]: line["held_out_tau"] for line in measured(made / "deep")}
    assert set(taus) == {3, 6} and facts["tau"] == max(taus.values()) == taus[facts["step"]]
    tree: Any = load(made / "eagle3.yaml").tree
    cycles: list[int] = []
    decoder = SpeculativeDecoder(
        target, tree_proposer(DRAFT_MODELS["eagle3"].drafter(head, target), tree)
    )
    for row in FeatureCache.open(made / "deep/features").split("held_out")[:3]:
        prompt = row.input_ids[None, : int(row.turn_ids.nonzero()[0])]
        cycles += decoder.generate(
            prompt, max_new_tokens=12, do_sample=False
        ).statistics.cycle_tokens
    assert facts["tau"] == pytest.approx(sum(cycles) / len(cycles))
    assert (
        train(
            "--output", tmp_path / "packed", "--features.mode", "online", "--train.packing", "true"
        )
        == 0
    )
    packed = load_head(tmp_path / "packed", vocab=target.vocab).fc.weight
    assert (packed - head.fc.weight).abs().max() < 1e-3 * packed.abs().max()


@pytest.mark.parametrize(
    ("changed", "change"),
    [("train.jsonl", "s/boats/ships/"), ("target/tokenizer.json", "0,/{{/s//{{ /")],
)
def test_stale_cache(made: Path, tmp_path: Path, capsys: Any, changed: str, change: str) -> None:
    """A cache does not outlive its data or tokenizer."""
    train = f"aerie train --config {made}/eagle3.yaml --output {tmp_path}/head"
    text = f"""
    {train} --plan
    sed -i.kept '{change}' {made}/{changed}
    {train} --plan
        exit 2
        {Path(changed).name} changed; rebuild with: aerie features
    {train} --is-whole
        exit 1
    {train} --plan --features.mode online
    mv {made}/{changed}.kept {made}/{changed}
    """
    tiny.session(text, capsys)


def test_warm_start(made: Path, tmp_path: Path) -> None:
    """A warm start keeps its vocabulary and a frozen lm head."""
    save_head(
        tiny.eagle3_head(vocab_of(made).embedding, torch.arange(100), after_blocks=TAPS),
        tmp_path / "warm",
    )
    warm = (
        "--head.init_from",
        tmp_path / "warm",
        "--head.draft_vocab_size",
        "null",
        "--train.max_steps",
        1,
        "--head.lm_head",
        "frozen",
    )
    assert (
        tiny.call(train_main, "--config", made / "eagle3.yaml", "--output", tmp_path / "new", *warm)
        == 0
    )
    stored = head_facts(tmp_path / "new")["draft_vocabulary"]
    assert stored["size"] == 100 and 0.0 < stored["coverage"] < 1.0
    before, after = (load_file(tmp_path / name / WEIGHTS) for name in ("warm", "new"))
    assert {name for name, value in before.items() if value.equal(after[name])} == {
        "lm_head.weight",
        "d2t",
        "t2d",
    }


def test_foreign_files(run: Any, tmp_path: Path, capsys: Any) -> None:
    """Foreign files stay."""
    text = """
    mkdir {tmp}/foreign
    echo precious > {tmp}/foreign/model.safetensors
    {train} --output {tmp}/foreign
        exit 2
        files that no run has made
    grep precious {tmp}/foreign/model.safetensors
    {train} --output {tmp}/foreign --overwrite
    aerie inspect {tmp}/foreign
    """
    tiny.session(text, capsys, tmp=tmp_path, train=line_of(run))


def line_of(run: Any) -> str:
    return " ".join(map(str, ("aerie train", *run.args[1:])))


def test_moved_runs(run: Any, tmp_path: Path, capsys: Any) -> None:
    """A moved run goes on.

    The measured tau, which picks the weights, depends on the tree; a cache of rounded states has
    the same rows.
    """
    choosing: Any = ("--train.measure_prompts", 1, "--train.measure_new_tokens", 4)
    assert killed_at(Stage, "finish", 1, lambda: run(*choosing))
    text = """
    mv {tmp}/run {tmp}/moved
    {train} {moved} --plan
    {features} {moved} --tree.levels 3
    {train} {moved} --tree.levels 3
        exit 2
        step 2 of another recipe or other data (tree.levels: 4 before, 3 now
    {features} {moved} --features.storage bf16
    {train} {moved} --features.storage bf16
        exit 2
        step 2 of another recipe or other data (features:
    """
    moved = " ".join(map(str, (*choosing, "--run", tmp_path / "moved")))
    train = line_of(run)
    features = train.replace("train", "features --overwrite", 1)
    tiny.session(text, capsys, tmp=tmp_path, moved=moved, train=train, features=features)


def test_kill_at_the_end(run: Any, tmp_path: Path, capsys: Any) -> None:
    """A kill at the very end costs no training."""
    weights = tmp_path / "run/heads/eagle1/model.safetensors"
    assert killed_at(Stage, "finish", 1, run) and run("--is-whole") == 1
    written = weights.read_bytes()
    assert killed_at(resume, "forget_saves", 1, run)
    assert run() == 0 and "train eagle1: whole, reused" in capsys.readouterr().out
    assert weights.read_bytes() == written
    assert not list((tmp_path / "run/state/eagle1").glob("step-*"))


def test_time_budget(run: Any, tmp_path: Path, capsys: Any) -> None:
    """A run that its budget ended goes on with another."""
    text = """
    {train} --train.max_seconds 0
        stopped by the time budget (train.max_seconds 0) at step 1 of 3:
    {train} --train.max_seconds 60 --train.seed 5
        exit 2
        holds another train (train.max_seconds: 0.0 before, 60.0 now; train.seed
    {train} --train.max_seconds 60
        going on from step 1 of 3
    cat {tmp}/run/heads/eagle1/provenance.json
        "ended": "finished"
        "steps": 3
    """
    tiny.session(text, capsys, train=line_of(run), tmp=tmp_path)
