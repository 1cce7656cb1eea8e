"""Measures rows that a server answers.

It checks that the server has the same target, times several requests at once, and compares the
server's drafts with those of an equally long chain that this engine decoded.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from aerie.configs.errors import UserError
from aerie.configs.read import as_dict
from aerie.data.distill.answer import Unanswered
from aerie.infer.decode.sampling import Decoding
from aerie.infer.measure import statistics
from aerie.infer.measure.bench_files import (
    SERVED_FILE,
    Cell,
    Milliseconds,
    Record,
    ServedFile,
    ServedLoad,
    ServerFacts,
    read_as,
)
from aerie.infer.measure.server import ServedAnswer, Server
from aerie.infer.measure.statistics import FloatArray, Group, group, tau
from aerie.infer.measure.tree_shape import TreeShape
from aerie.model.storage import write_json
from aerie.model.target import Target

LEAST_AGREEMENT = 0.8  # rounding and quantised weights change a few tokens in a hundred

# --- the row's records ----------------------------------------------------------------------------


def served_tree(server: ServerFacts) -> TreeShape:
    """A served row has this instead of a tree: its name, and the length of its drafts."""
    tokens = server.draft_tokens
    text = f"{server.name}, {tokens} tokens" if tokens else server.name
    return TreeShape("served", tokens, 1, tokens + 1, {"name": server.name}, text)


def record_facts(answer: ServedAnswer, text: str) -> dict[str, Any]:
    """A record's fields. `accepted` has no order, and is not cut at the answer's end."""
    decode_ms = answer.wall_ms - answer.prefill_ms
    return {
        "verify": "server",
        "new_tokens": answer.new_tokens,
        "output_ids": answer.token_ids,
        "text": text,
        "accepted": answer.drafts.accepted,
        "target_forwards": answer.drafts.cycles,
        "draft_nodes": answer.drafts.draft_tokens,
        "ms": asdict(Milliseconds(answer.prefill_ms, 0, 0, 0, decode_ms, answer.wall_ms)),
    }


# --- the same server, the same target -------------------------------------------------------------


def keep_facts(directory: Path, servers: Mapping[int, Server]) -> None:
    """Writes the servers' facts; raises UserError if an earlier call of the bench had others."""
    if not servers:
        return
    path = directory / SERVED_FILE
    facts = {row: server.facts for row, server in servers.items()}
    kept = read_as(path, ServedFile) if path.is_file() else ServedFile(facts)
    for row, server in facts.items():
        before = kept.servers.get(row, server)
        for name in ("model", "root", "server", "draft_tokens"):
            was, now = getattr(before, name), getattr(server, name)
            if was != now:
                raise UserError(
                    f"{server.url}: its {name.replace('_', ' ')} is {now} now, and was {was} for "
                    "the answers so far; start the server as before, or add --overwrite"
                )
    write_json(path, as_dict(replace(kept, servers=facts)))


def require_same_target(
    server: Server, target: Target, prompts: Sequence[Sequence[int]], decoding: Decoding
) -> None:
    """Raises UserError unless the target would choose most of the server's greedy tokens."""
    agreed = 0
    count = 0
    for prompt_ids in prompts:
        try:
            answer = server.read(server.complete(prompt_ids, decoding, 0))
        except Unanswered:  # the row's records will have the reason
            continue
        ids = answer.token_ids
        count += len(ids)
        if ids and 0 <= min(ids) <= max(ids) < target.config.get_text_config().vocab_size:
            text = torch.tensor([[*prompt_ids, *ids]], device=target.device)  # [1, T]
            with torch.inference_mode():
                logits = target.model(text).logits[0, len(prompt_ids) - 1 : -1]  # [n, V]
            agreed += int((logits.argmax(-1) == text[0, len(prompt_ids) :]).sum())
    if agreed < LEAST_AGREEMENT * count:
        raise UserError(
            f"{server.url}: serves another model ({server.facts.root or server.facts.model}): "
            f"{target.recipe.path} would write {agreed} of its {count} greedy tokens; "
            "serve this target"
        )


# --- several requests at once ---------------------------------------------------------------------


def measure_loads(
    directory: Path,
    servers: Mapping[int, Server],
    records: Sequence[Record],
    decoding_of: Callable[[Record], Decoding],
    seed: int,
) -> None:
    """Asks each row's prompts again, several at once, unless served.json has the result."""
    path = directory / SERVED_FILE
    for row, server in servers.items():
        answers = [record for record in records if record.row == row and record.status == "ok"]
        for sampling in dict.fromkeys(record.sampling for record in answers):
            cell = Cell(row, *sampling)
            of_cell = [record for record in answers if record.sampling == sampling]
            for at_once in server.config.at_once:
                kept = read_as(path, ServedFile)
                if not any(load_cell(load) == (cell, at_once) for load in kept.loads):
                    load = measure_load(server, cell, at_once, of_cell, records, decoding_of, seed)
                    write_json(path, as_dict(replace(kept, loads=(*kept.loads, load))))


def load_cell(load: ServedLoad) -> tuple[Cell, int]:
    return Cell(load.row, *load.sampling), load.at_once


def measure_load(
    server: Server,
    cell: Cell,
    at_once: int,
    answers: Sequence[Record],
    records: Sequence[Record],
    decoding_of: Callable[[Record], Decoding],
    seed: int,
) -> ServedLoad:
    """Times the row's prompts, each asked at least once, prefill included.

    records: of all rows, for vanilla's answers.
    """
    asked = list(islice(cycle(answers), max(len(answers), 2 * at_once)))

    def ask(record: Record) -> ServedAnswer | None:
        try:
            return server.read(server.complete(record.prompt_ids, decoding_of(record), seed))
        except Unanswered:
            return None

    start = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        replies = list(pool.map(ask, asked))
    seconds = time.perf_counter() - start
    vanilla = {
        record.prompt_key: record.output_ids
        for record in records
        if record.method == "vanilla" and record.sampling == cell.sampling
    }
    same = []
    for record, reply in zip(asked, replies, strict=True):
        if cell.temperature == 0 and reply is not None and reply.token_ids:
            same.append(reply.token_ids == vanilla.get(record.prompt_key))
    return ServedLoad(
        **asdict(cell),
        at_once=at_once,
        answers=len(asked),
        failed=replies.count(None),
        new_tokens=sum(reply.new_tokens for reply in replies if reply is not None),
        seconds=seconds,
        compared=len(same),
        identical=sum(same),
    )


# --- what the report says -------------------------------------------------------------------------


class Drafted(NamedTuple):
    """The drafts of a row, or of some of its answers."""

    cycles: int
    accepted: FloatArray  # [K] how many cycles accepted the draft token at each position

    @property
    def shares(self) -> list[float]:
        return (self.accepted / max(self.cycles, 1)).tolist()


def drafted(records: Iterable[Record], levels: int) -> Drafted:
    cycles = 0
    accepted = np.zeros(levels)
    for record in records:
        cycles += record.target_forwards
        for count in record.accepted:
            accepted[:count] += 1
    return Drafted(cycles, accepted)


def served_figures(members: Group, groups: Sequence[Group], file: ServedFile) -> dict[str, Any]:
    """The figures that summary.json has only for a served row.

    groups: of all rows. file: the content of served.json.
    """
    first = members.first
    server = file.servers[first.row]
    levels = first.tree.levels if first.tree else 0
    total = drafted(members.good, levels)
    tells = bool(total.cycles and levels)
    at_once = []
    for load in file.loads:
        if (load.row, load.sampling) == (first.row, first.sampling):
            values = {**asdict(load), "tokens_per_s": load.tokens_per_s}
            for part in fields(Cell):
                del values[part.name]
            at_once.append(values)
    return {
        **asdict(server),
        # The server counts these before it cuts an answer at its end.
        "accepted_by_position": total.shares if tells else None,
        "mean_acceptance_length": 1 + sum(total.shares) if tells else None,
        "at_once": at_once,
        "chain": beside_chain(members, groups),
    }


def beside_chain(members: Group, groups: Sequence[Group]) -> dict[str, Any] | None:
    """A comparison with the bench's equally long chain, or None.

    Of several such chains (of several heads) it takes the one with the most similar cycles.
    """
    comparisons = [compare_drafts(members, chain) for chain in groups if is_like(members, chain)]
    return min(filter(None, comparisons), key=lambda chain: chain["differing"], default=None)


def compare_with_chains(records: Sequence[Record], rows: Collection[int]) -> list[dict[str, Any]]:
    """Compares each served row among `rows` with each equally long chain among them."""
    groups = [members for members in group(records) if members.first.row in rows]
    pairs = [pair for pair in permutations(groups, 2) if is_like(*pair)]
    return [comparison for pair in pairs if (comparison := compare_drafts(*pair)) is not None]


def is_like(members: Group, chain: Group) -> bool:
    """Whether `chain` is a greedy chain that always drafts as many tokens as the server."""
    tree, served = chain.first.tree, members.first.tree
    if tree is None or served is None or chain.first.sampling != members.first.sampling:
        return False
    is_constant = tree.settings.get("stop", {}).get("rule") == "constant"
    is_greedy = members.first.temperature == 0  # sampled answers differ anyway
    if members.first.method != statistics.SERVED or not is_greedy:
        return False
    return tree.shape == "chain" and is_constant and tree.levels == served.levels


def compare_drafts(members: Group, chain: Group) -> dict[str, Any] | None:
    """Compares cycles and acceptance on the answers that are identical; None without any.

    The drafts are the same if both took equally many cycles for every answer. Otherwise
    `other_from` is the first position at which the shares of accepted tokens differ by more than
    the server's counting explains: it counts an answer's last cycle before the cut at its end.
    """
    theirs = {record.prompt_key: record for record in chain.good}
    pairs = []
    for record in members.good:
        ours = theirs.get(record.prompt_key)
        if record.target_forwards and ours is not None and ours.output_ids == record.output_ids:
            pairs.append((record, ours))
    if not pairs:
        return None
    levels = chain.first.tree.levels if chain.first.tree else 0
    served = drafted((record for record, _ in pairs), levels)
    here = drafted((ours for _, ours in pairs), levels)
    differing = sum(record.target_forwards != ours.target_forwards for record, ours in pairs)
    position = None
    says_accepted = any(record.accepted for record, _ in pairs)
    if differing and says_accepted:
        gaps = np.abs(np.subtract(served.shares, here.shares))
        is_other = gaps > len(pairs) / min(served.cycles, here.cycles)
        position = int(is_other.argmax()) + 1 if is_other.any() else None
    return {
        "row": chain.first.row,
        "method": chain.first.method,
        "answers": len(pairs),
        "differing": differing,
        "cycles": served.cycles,
        "chain_cycles": here.cycles,
        "chain_tau": tau(chain.good),
        "chain_accepted_by_position": here.shares,
        "other_from": position,
    }
