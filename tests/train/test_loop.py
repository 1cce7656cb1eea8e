"""Laws of the loop: cutting a step changes nothing, the best weights stay, the budget ends a run; what it logs."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from aerie.configs.errors import Requeued, UserError
from aerie.configs.schema.heads import AdamWSection, Eagle1Train, MuonSection, RateScaling
from aerie.data.batches import collate
from aerie.model.checkpoint import load_head
from aerie.model.miniature import small_model
from aerie.model.storage import ROOT
from aerie.train import deepspeed_internals, processes, resume
from aerie.train.loop import MetricsFile
from aerie.train.objectives import Eagle1Objective
from aerie.train.optimizers import build_optimizers, learning_rate, muon_matrices
from tests import tiny
from tests.train.sittings import VOCAB, config, job, lines, sitting, weights


@pytest.mark.parametrize(("batch_size", "accumulation"), [(20, 1), (5, 4), (8, 1)])
def test_loss_and_gradient_are_means_over_the_supervised_slots_of_all_parts_and_steps(
    tmp_path: Path, batch_size: int, accumulation: int
) -> None:
    """20 rows: as one batch, as four parts of a step, and as three steps without learning, in one log line."""
    steps, still = (
        -(-20 // (batch_size * accumulation)),
        {"epochs": 1, "learning_rate": 1e-12, "clip_norm": 1e-6},
    )
    made = job(
        tmp_path, config(batch_size=batch_size, accumulation=accumulation, log_every=steps, **still)
    )
    objective = Eagle1Objective(
        tiny.head(VOCAB.embedding, scale=5.0).train(), VOCAB, made.objective.settings
    )
    batch = objective.prepare(collate([*made.rows.train], range(20)), epoch=0)
    loss = objective(batch).total(objective.weights) / objective.counts(batch)["feature"]
    loss.backward()
    norm = torch.cat(
        [p.grad.flatten() for p in objective.parameters() if p.grad is not None]
    ).norm()
    sitting(made)
    first = lines(tmp_path)[0]
    assert (
        first["loss"] == pytest.approx(loss.item(), rel=1e-5)
        and 0.05 < first["peak_memory_gib"] < 64
    )
    assert steps > 1 or first["grad_norm"] == pytest.approx(
        norm.item(), rel=1e-5
    )  # before clipping


def test_the_head_on_disk_is_the_one_with_the_best_held_out_score(tmp_path: Path) -> None:
    seen: list[Any] = []

    def measure(head: Any) -> dict[str, float]:
        seen.append(head.fc.weight.clone())
        return {"tau": [2.0, 3.0, 1.0][len(seen) - 1]}

    _, loop = sitting(job(tmp_path, config(max_steps=3, eval_every=1)), measure=measure)
    assert loop.progress.best_step == 2 and not seen[0].equal(seen[1])
    assert load_head(tmp_path / "head").fc.weight.equal(seen[1])
    half = replace(VOCAB, embedding=VOCAB.embedding.bfloat16(), lm_head=VOCAB.lm_head.bfloat16())
    _, loop = sitting(
        job(tmp_path / "unmeasured", config(max_steps=2, eval_every=1), vocab=half, held_out=0)
    )
    assert load_head(tmp_path / "unmeasured/head").fc.weight.equal(
        weights(loop)["fc.weight"].bfloat16()
    )


def test_a_compiled_training_is_the_plain_one_and_goes_on_as_it(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))
    settings = config(max_steps=6, save_every=3, eval_every=3)
    with pytest.raises(RuntimeError, match="power cut"):
        sitting(job(tmp_path / "compiled", replace(settings, compile=True), (6, 0)))
    _, loop = sitting(job(tmp_path / "compiled", settings))
    _, plain = sitting(job(tmp_path / "plain", settings))
    pairs = zip(lines(tmp_path / "compiled"), lines(tmp_path / "plain"), strict=True)
    for first, second in pairs:
        assert first.keys() == second.keys() and first["step"] == second["step"]
        numbers = [name for name in first if name.startswith(("loss", "grad_norm", "held_out"))]
        assert [first[name] for name in numbers] == pytest.approx(
            [second[name] for name in numbers], rel=1e-5
        )
    assert all(
        weights(loop)[name].allclose(value, atol=1e-5) for name, value in weights(plain).items()
    )
    assert sorted(load_file(tmp_path / "compiled/head/model.safetensors")) == sorted(
        load_file(tmp_path / "plain/head/model.safetensors")
    )


@pytest.mark.slow
def test_a_training_that_would_compile_says_first_that_there_is_no_compiler() -> None:
    torch._dynamo.reset()
    gone = torch._inductor.config.patch({"cpp.cxx": (None, "/gone/g++")})
    with (
        gone,
        pytest.raises(
            UserError, match=r"train.compile: .*; install a C\+\+ compiler \(g\+\+\), or leave"
        ),
    ):
        processes.check_compiler()


def test_a_training_that_diverges_keeps_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "aerie.train.losses.smooth_l1", lambda predicted, true: predicted.sum(-1) * float("nan")
    )
    with pytest.raises(
        UserError, match=r"the training diverged \(nothing was kept\); lower train.learning_rate"
    ):
        sitting(job(tmp_path, config()))
    assert not (tmp_path / "head/model.safetensors").exists()


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_the_rate_rises_to_its_peak_and_falls_to_its_end_at_the_last_step(schedule: Any) -> None:
    settings = Eagle1Train(learning_rate=1.0, warmup_steps=10, schedule=schedule, final_rate=0.4)
    rates = [learning_rate(step, 110, settings) for step in range(111)]
    half, end = (1.0, 1.0) if schedule == "constant" else (0.7, 0.4)
    assert (
        rates[0] > 0
        and max(rates) == rates[10] == 1.0
        and [rates[60], rates[110]] == pytest.approx([half, end])
    )
    scaled = replace(
        settings,
        optimizer=MuonSection(matrix_rate=3.0),
        scale_rates=RateScaling(steps=440, power=0.5),
    )
    assert [learning_rate(step, 110, scaled, True) for step in range(111)] == pytest.approx(
        [6 * rate for rate in rates]
    )
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_matrices_decay_and_norms_do_not_and_the_embedding_is_not_there() -> None:
    head = tiny.head(VOCAB.embedding)
    decayed, spared = build_optimizers(head, Eagle1Train(weight_decay=0.3))[0].param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2} and {p.ndim for p in spared["params"]} == {1}
    found = {id(p) for group in (decayed, spared) for p in group["params"]}
    assert found == {id(p) for p in head.parameters()} - {id(head.embed_tokens.weight)}


def five_rounds(gradient: torch.Tensor) -> torch.Tensor:
    """Five rounds of Newton-Schulz (Muon), in float64."""
    is_tall = gradient.shape[0] > gradient.shape[1]
    x = (gradient.T if is_tall else gradient).double() / gradient.double().norm()
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x


@pytest.mark.parametrize("join", [None, deepspeed_internals.zero_muon])
def test_muon_moves_every_direction_of_a_matrix_by_its_rate_and_adamw_the_rest_as_alone(
    join: Any,
) -> None:
    moved: list[dict[str, torch.Tensor]] = []
    for section in (MuonSection(matrix_rate=0.1, weight_decay=0.0), AdamWSection()):
        model, generator = tiny.llama(num_blocks=1), torch.Generator().manual_seed(0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        with torch.compiler.set_stance("force_eager"):
            for optimizer in build_optimizers(model, config(optimizer=section), join):
                optimizer.step()
        moved.append({name: p.detach() - before[name] for name, p in model.named_parameters()})
    matrices = {name for name in moved[0] if "proj" in name}
    assert len(matrices) == 7 and all(
        moved[0][name].equal(moved[1][name]) for name in moved[0].keys() - matrices
    )
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name in matrices:
        turn = moved[0][name] / (
            -0.1 * max(1.0, moved[0][name].shape[0] / moved[0][name].shape[1]) ** 0.5
        )
        sizes = torch.linalg.svdvals(turn)
        assert 0.5 < sizes.min() <= sizes.max() < 1.5
        torch.testing.assert_close(
            turn, five_rounds(gradients[name]).float(), rtol=0, atol=1e-3
        )  # bf16 is 1e-2 away
    gpt2 = small_model(AutoConfig.for_model("gpt2")).transformer  # tables by other names
    assert not {id(gpt2.wte.weight), id(gpt2.wpe.weight)} & {id(p) for p in muon_matrices(gpt2)}


@pytest.mark.parametrize(
    ("precision", "zero"),
    [
        ("fp16", None),
        ("no", {"stage": 0}),
        ("bf16", {"stage": 2, "offload_optimizer": {"device": "cpu"}}),
    ],
)
def test_muon_refuses_what_it_cannot_train_in(
    precision: str, zero: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    plugin = None if zero is None else SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    made = SimpleNamespace(
        mixed_precision=precision, state=SimpleNamespace(deepspeed_plugin=plugin), num_processes=1
    )
    monkeypatch.setattr(
        processes, "Accelerator", lambda **_: SimpleNamespace(**vars(made), distributed_type="any")
    )
    with pytest.raises(UserError, match=r"train.optimizer: muon trains in float32 or bf16"):
        processes.build_accelerator(config(optimizer=MuonSection()), tmp_path)


def test_a_run_that_goes_on_forgets_its_own_later_lines_and_keeps_what_another_training_writes(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "eagle1", "step": 20}\n{"kind": "eagle1", "st\n')  # cut off by a kill
    other = MetricsFile(path, "draft_lm", 0)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(
            lambda: [other.write({"kind": "draft_lm", "step": step}) for step in range(100)]
        )
        while not training.done():
            MetricsFile(path, "eagle1", 20).write({"kind": "eagle1", "step": 30})
    MetricsFile(path, "eagle1", 20)
    assert [line["step"] for line in lines(tmp_path)] == [20, *range(100)]


@pytest.mark.parametrize("number", resume.STATES)
def test_a_signal_ends_at_once_between_steps_alone(
    number: signal.Signals, monkeypatch: Any
) -> None:
    before = signal.getsignal(number)
    with (
        resume.StopRequest(),
        pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Requeued),
    ):
        signal.raise_signal(number)
    with resume.StopRequest() as stop:
        stop.is_stepping = True
        for _ in range(2):  # launchers and schedulers send it again
            signal.raise_signal(number)
        assert stop.state == resume.STATES[number]
        monkeypatch.setattr(resume, "PATIENCE_SECONDS", -1.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before


def test_private_parts_of_deepspeed_are_those_of_the_pinned_version(monkeypatch: Any) -> None:
    known = deepspeed_internals.KNOWN_VERSION
    assert f"deepspeed=={known}\n" in (ROOT / "constraints.txt").read_text()
    deepspeed_internals.require_known_version()
    monkeypatch.setattr("deepspeed.__version__", "0.20.0")
    with pytest.raises(UserError, match=rf"0.20.0: .*pip install deepspeed=={known}, or launch"):
        deepspeed_internals.clip_before_muon(None, 1.0)
