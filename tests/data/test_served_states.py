"""Laws of states from servers: the target's own, and no other server's."""

import json
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState

from aerie.configs.schema.data import StateServersConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.data import served_states, servers
from aerie.data.feature_cache import CachePlan, FeatureCache
from aerie.data.features import extract
from aerie.data.served_states import ServedStates
from aerie.data.servers import states_command
from aerie.data.state_server import ServerFault, StatesFolder, sweep_states
from aerie.data.tokens import TokenisedData
from aerie.model.storage import Lock, read_json
from aerie.model.target import Target, load_shell
from tests import tiny
from tests.data import caches
from tests.data.state_server import StateStandIn

DATA = TokenisedData(train=caches.rows(24), held_out=caches.rows(3, seed=1))
ROWS = [*DATA.train, *DATA.held_out]
TAPS = (1, 3)
IDS = (1, 3, 4)  # the tiny target has four blocks


@pytest.fixture
def states(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.fixture
def plan(target: Target, tmp_path: Path) -> CachePlan:
    return caches.plan(tmp_path / "features", target, DATA, after_blocks=TAPS, batch_tokens=1)


def write(plan: CachePlan, target: TargetConfig, *servers: StateStandIn, **keys: Any) -> Any:
    """Writes the cache from these servers."""
    folder = servers[0].states
    settings: dict[str, Any] = {"concurrency": 3, "timeout_s": 5.0, "retries": 1, **keys}
    config = StateServersConfig(tuple(server.url for server in servers), str(folder), **settings)
    with ServedStates(config, target, TAPS, ROWS, plan.directory) as source:
        return extract(source, plan, PartialState(), {"data": {"max_length": 40}})[0]


def test_the_same_slots_and_states(
    target: Target, plan: CachePlan, states: Path, tmp_path: Path
) -> None:
    """A served cache has the slots of a local one, the same states, and says who made them."""
    local = caches.cache(tmp_path / "local", target, DATA, after_blocks=TAPS)
    with StateStandIn(target.model, IDS, states) as server:
        write(plan, target.recipe, server)
    served = FeatureCache.open(plan.directory)
    assert served.fingerprint == local.fingerprint and served.lengths == local.lengths
    for ours, theirs in zip(local, served, strict=True):
        assert ours.input_ids.equal(theirs.input_ids) and ours.turn_ids.equal(theirs.turn_ids)
        torch.testing.assert_close(theirs.last_hidden, ours.last_hidden, atol=1e-5, rtol=0)
        torch.testing.assert_close(theirs.taps, ours.taps, atol=1e-5, rtol=0)
    record = read_json(plan.shards[0].record)["server"]
    assert record == {"vllm": ["0.32.0"], "dtype": "float32", "state_ids": [1, 3, 4]}
    assert [*states.iterdir()] == []


def test_files_of_others_stay(target: Target, plan: CachePlan, states: Path) -> None:
    """Files of killed processes of the same run go; those of others and of a living one stay."""
    with StateStandIn(target.model, IDS, states) as server:
        with ServedStates(
            StateServersConfig((server.url,), str(states)), target.recipe, TAPS, ROWS, Path("run")
        ) as living:
            folder = living.folder
            name = f"cmpl-aerie-{folder.run}-{{}}-7-0-0123.safetensors"
            kept = {
                states / name.format(folder.session),
                states / "cmpl-0123-0.safetensors",
                states / name.format("01234567").replace(folder.run, "fedcba98"),
                folder.lock.path,
            }
            dead = {states / name.format("01234567"), states / (name.format("01234567") + ".lock")}
            with Lock(states / f".aerie-{folder.run}-89abcdef-lock"):
                pass  # its process has ended
            for path in kept | dead:
                path.touch()
            with ServedStates(living.config, target.recipe, TAPS, ROWS, Path("run")):
                pass
            assert {*states.iterdir()} == kept
        assert {*states.iterdir()} == {path for path in kept if folder.session not in path.name}


def other_model(change: str) -> Any:
    """A server's model that is not the target, or computes otherwise."""
    model = tiny.llama(seed=1 if change == "all" else 0).requires_grad_(False)
    if change == "blocks":
        model.model.layers[2].mlp.down_proj.weight.mul_(1.01)
    if change == "norm":
        model.model.norm.weight.copy_(torch.linspace(-2, 2, 32))
    return model.to(torch.bfloat16) if change == "dtype" else model


REFUSED: dict[str, tuple[str, tuple[int, ...], int, str]] = {  # change, ids, room, message
    "another model": ("all", IDS, 300, "differ by .* from our own forward's, so it serves"),
    "other blocks": ("blocks", IDS, 300, "states after .* differ by"),
    "dtype": ("dtype", IDS, 300, "computes in bfloat16, but the target has float32; .*--dtype fl"),
    "a missing column": ("", (1, 4), 300, r"gives 2 states per token, .* \[1, 3, 4\] are needed"),
    "other ids": ("", (1, 2, 4), 300, "states after 3 blocks differ by .*or other state ids"),
    "no room": ("", IDS, 20, r"room for 20 tokens .*data.max_length to 19, or restart it with: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_servers(case: str, target: Target, plan: CachePlan, states: Path) -> None:
    """A server of other states is refused in a line, before any shard is made."""
    change, ids, room, message = REFUSED[case]
    with StateStandIn(other_model(change), ids, states, room) as server:
        tiny.refused(message, write, plan, target.recipe, server)
    assert not plan.directory.exists() and [*states.iterdir()] == []


SERVED_ONLY: dict[str, tuple[str, tuple[int, ...], str]] = {
    "right": ("", (0, *IDS), ""),
    "another model": ("all", (0, *IDS), "states after 0 blocks are not the target's embedding"),
    "another norm": ("norm", (0, *IDS), "its next token is .* another model"),
    "no embedding": ("", IDS, r"gives 3 states per token, but \[0, 1, 3, 4\] are needed"),
}


@pytest.mark.parametrize("case", SERVED_ONLY)
def test_a_target_that_is_only_served(
    case: str, target: Target, plan: CachePlan, states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its blocks, the embedding and the next tokens tell whether it is the target."""
    monkeypatch.setattr(servers, "FITS_BYTES", 0)
    monkeypatch.setattr(Target, "load", None)  # never loaded
    change, ids, message = SERVED_ONLY[case]
    with StateStandIn(other_model(change), ids, states) as server:
        if message:
            tiny.refused(message, write, plan, target.recipe, server)
        else:
            assert write(plan, target.recipe, server) is not None


def sometimes(fault: str, first: int, last: int = 10**9) -> Callable[[int], str]:
    return lambda number: fault if first <= number <= last else ""


@pytest.mark.parametrize("fault", ["die", "garbage", "busy", "other tokens", "no file", "zeros"])
def test_lost_requests(
    fault: str, target: Target, plan: CachePlan, states: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What one server loses another one gives, after a single line."""
    with ExitStack() as stack:
        right = stack.enter_context(StateStandIn(target.model, IDS, states))
        wrong = StateStandIn(target.model, IDS, states, fault=sometimes(fault, 5))
        stack.enter_context(wrong)
        assert write(plan, target.recipe, wrong, right) is not None
    warnings = [line for line in capsys.readouterr().err.splitlines() if "asked for again" in line]
    assert len(warnings) == 1 and wrong.url.removesuffix("/v1") in warnings[0]
    assert [*states.iterdir()] == []


def test_a_server_that_hangs(
    target: Target, plan: CachePlan, states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error it is looked at once more; no row waits for that."""
    monkeypatch.setattr(served_states, "AWAY_S", 0.0)

    def fault(number: int) -> str:
        return {1: "", 2: "busy"}.get(number, "hang")

    with ExitStack() as stack:
        right = stack.enter_context(StateStandIn(target.model, IDS, states))
        wrong = stack.enter_context(StateStandIn(target.model, IDS, states, fault=fault))
        before = time.monotonic()
        assert write(plan, target.recipe, wrong, right, concurrency=1, timeout_s=60.0)
        assert time.monotonic() - before < 60.0 and wrong.count <= 5
    assert [*states.iterdir()] == []


def test_all_wait_for_one_look(target: Target, plan: CachePlan, states: Path) -> None:
    """Where only a server that hangs is left, all rows wait for one request to it."""
    hangs = sometimes("hang", 2)
    with StateStandIn(target.model, IDS, states, fault=hangs) as server:
        config = StateServersConfig((server.url,), str(states), timeout_s=1.0)
        with ServedStates(config, target.recipe, TAPS, ROWS, plan.directory) as source:
            [only] = source.servers
            only.model = ""
            with ThreadPoolExecutor(8) as pool:
                looks = [pool.submit(source._check, only) for _ in range(8)]
            assert all(isinstance(look.exception(), ServerFault) for look in looks)
    assert server.count == 2


def test_late_files(target: Target, plan: CachePlan, states: Path) -> None:
    """What a server writes after the end of a stage goes when the stage is next looked at."""
    with StateStandIn(target.model, IDS, states) as server:
        write(plan, target.recipe, server)
        run = StatesFolder(states, plan.directory)
        late = f"cmpl-{run.next_request()}-0-0123.safetensors"
        run.close()
        for name in (late, f"{late}.lock", "cmpl-of-another.safetensors"):
            (states / name).touch()
        sweep_states(StateServersConfig((server.url,), str(states)), plan.directory)
    assert [path.name for path in states.iterdir()] == ["cmpl-of-another.safetensors"]


@pytest.mark.parametrize("fault", ["die", "garbage"])
def test_all_servers_end(
    fault: str, target: Target, plan: CachePlan, states: Path, tmp_path: Path
) -> None:
    """Without a server the stage ends in a line; the same command goes on, and nothing is lost."""
    undisturbed = replace_directory(plan, tmp_path / "undisturbed")
    with StateStandIn(target.model, IDS, states) as server:
        write(undisturbed, target.recipe, server)
    with StateStandIn(target.model, IDS, states, fault=sometimes(fault, 14)) as server:
        tiny.refused("attempts: 2.*vllm serve", write, plan, target.recipe, server)
    assert 0 < len(plan.missing()) < len(plan.shards) and [*states.iterdir()] == []
    times = {path: path.stat().st_mtime_ns for path in plan.directory.glob("shard-*")}
    with StateStandIn(target.model, IDS, states) as server:
        write(plan, target.recipe, server)
    assert caches.contents(plan.directory) == caches.contents(undisturbed.directory)
    assert times.items() <= {path: path.stat().st_mtime_ns for path in times}.items()


def replace_directory(plan: CachePlan, directory: Path) -> CachePlan:
    shards = [replace(shard, path=directory / shard.path.name) for shard in plan.shards]
    return replace(plan, directory=directory, shards=shards)


def test_another_server_at_the_same_address(target: Target, plan: CachePlan, states: Path) -> None:
    """A server that failed is compared anew before its states are used again."""

    def fault(number: int) -> str:
        if number == 9:
            server.model = tiny.llama(seed=1)
            return "busy"
        return ""

    with StateStandIn(target.model, IDS, states, fault=fault) as server:
        tiny.refused("differ by .*another model", write, plan, target.recipe, server)


def test_another_folder(
    target: Target, plan: CachePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder to which the server does not write is refused."""
    monkeypatch.setattr(served_states, "PROBE_S", 0.1)
    with StateStandIn(target.model, IDS, tmp_path / "theirs") as server:
        config = StateServersConfig((server.url,), str(tmp_path / "ours"))
        source = ServedStates(config, target.recipe, TAPS, ROWS, plan.directory)
        tiny.refused("has not appeared; features.server.states must name", source.__enter__)


def test_one_of_two_answers(target: Target, plan: CachePlan, states: Path) -> None:
    """A server that is not there at the start is done without."""
    away = StateStandIn(target.model, IDS, states)
    away.server_close()
    with StateStandIn(target.model, IDS, states) as server:
        assert write(plan, target.recipe, away, server, retries=0) is not None


def test_many_dead_servers(
    target: Target, plan: CachePlan, states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one server answers, others may be dead: they end no stage, however many they are."""
    monkeypatch.setattr(served_states, "AWAY_S", 0.0)  # they are asked again and again
    dead = [StateStandIn(target.model, IDS, states) for _ in range(3)]
    for server in dead:
        server.server_close()
    with StateStandIn(target.model, IDS, states) as server:
        assert write(plan, target.recipe, *dead, server, retries=1) is not None


def test_nobody_answers(target: Target, plan: CachePlan, states: Path) -> None:
    """The line has the command that starts a server."""
    server = StateStandIn(target.model, IDS, states)
    server.server_close()
    message = r"refused .attempts: 1.*vllm serve .*--max-model-len 38 .*\[1, 3, 4\].*cpu_stat"
    tiny.refused(message, write, plan, target.recipe, server, retries=0)


def test_the_command_of_a_server(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's words, quoted for a shell; a large target is asked for its embedding, too."""
    path = target.recipe.path
    narrow = replace(target.recipe, dtype="bfloat16", revision="abc", trust_remote_code=True)
    words = shlex.split(states_command(narrow, TAPS, "/some states", 40, is_cpu=False))
    assert words[:6] == ["vllm", "serve", path, "--revision", "abc", "--trust-remote-code"]
    assert words[6:10] == ["--dtype", "bfloat16", "--max-model-len", "41"]
    draft, transfer = json.loads(words[12]), json.loads(words[14])
    assert draft["draft_model_config"]["hf_config"] == {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4]
    }
    assert transfer["kv_connector"] == "ExampleHiddenStatesConnector"
    assert transfer["kv_connector_extra_config"] == {"shared_storage_path": "/some states"}
    monkeypatch.setattr(servers, "FITS_BYTES", 0)
    # A row as long as the context cannot be asked for; the server keeps the model's own limit.
    command = states_command(target.recipe, TAPS, "/states", 256, is_cpu=True)
    assert command.startswith("PYTHONPATH=/") and "[0, 1, 3, 4]" in command
    assert " --dtype float32 --disable" in command and '"cpu_states"' in command


def test_a_shell_is_the_target(target: Target) -> None:
    """Norm and LM head of a shell give the target's own last states and logits."""
    shell = load_shell(target.recipe)
    inputs = list[torch.Tensor]()
    hook = target.model.model.norm.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    last_hidden = target.features(torch.arange(9)[None]).last_hidden
    hook.remove()
    assert shell.norm(inputs[0]).equal(last_hidden)
    assert shell.vocab.logits(last_hidden).equal(target.logits(last_hidden))
    assert shell.fingerprint() == target.fingerprint()
