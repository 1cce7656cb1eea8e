"""Measures the ladder of acceptance: the same head and prompts, from training to a server.

Each step adds one thing to the step above. `teacher_forced` drafts at every token, like training;
`chain` drafts only where the last draft ended; `tree` has more than one guess; `server` is another
program; `reported` is that program's own count.
"""

from collections import Counter
from collections.abc import Sequence

from aerie.configs.errors import UserError
from aerie.configs.schema.decode import ChainConfig
from aerie.data.progress import start_progress
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.proposers import tree_proposer
from aerie.infer.decode.roles import Cycle, Drafter, Proposer
from aerie.infer.decode.sampling import resolve
from aerie.infer.diagnose.answers import LearntText
from aerie.infer.diagnose.figures import Drafting, estimates
from aerie.infer.diagnose.patient import Patient
from aerie.infer.measure.served import require_same_target
from aerie.infer.measure.server import Server
from aerie.model.checkpoint import head_facts
from aerie.model.inspection import SCORES
from aerie.model.target import Target

DROPS = {  # step -> the name of its loss, and the step that it is compared with
    "chain": ("exposure", "teacher_forced"),
    "tree": ("tree", "chain"),
    "server": ("server", "chain"),
    "reported": ("counting", "server"),
}
ASKED_FIRST = 2  # prompts to check that a server has the target


def chain_of(drafter: Drafter, levels: int) -> Proposer:
    """A proposer of chains of the head's likeliest tokens."""
    levels = min(levels, drafter.max_levels)
    return tree_proposer(drafter, ChainConfig(levels=levels, children="best"))


def decoded(target: Target, proposer: Proposer, texts: Sequence[LearntText], name: str) -> Drafting:
    """Decodes the texts' answers again, after the same prompts, and counts the cycles."""
    decoder = SpeculativeDecoder(target, proposer)
    decoder.runners.mode = "eager"  # speed does not count here
    lines = []
    with start_progress(len(texts), "prompts", name) as progress:
        for text in texts:
            room = min(decoder.limits.values()) - len(text.prompt)
            cycles = AcceptanceCounts()
            decoder.generate(
                text.prompt,
                do_sample=False,
                max_new_tokens=max(1, min(len(text.ids) - len(text.prompt), room)),
                on_cycle=cycles,
            )
            lines.append(cycles.line)
            progress.update()
    return Drafting.of_prompts(lines)


class AcceptanceCounts:
    """An `on_cycle` hook that counts how far the drafts of an answer were accepted."""

    def __init__(self) -> None:
        self.line = Counter[str](tokens=0, starts=0)

    def __call__(self, cycle: Cycle) -> None:
        accepted = min(cycle.verdict.accepted, cycle.new_tokens)  # an end token may cut the path
        self.count(accepted, min(cycle.tree.levels, cycle.new_tokens), cycle.new_tokens)

    def count(self, accepted: int, drafted: int, tokens: int) -> None:
        """Adds a cycle with this many accepted, drafted and new tokens."""
        self.line["tokens"] += tokens
        self.line["starts"] += 1
        for position in range(1, min(drafted, accepted + 1) + 1):
            self.line[f"tries_{position}"] += 1
            self.line[f"hits_{position}"] += position <= accepted


def served(patient: Patient, server: Server, texts: Sequence[LearntText]) -> dict[str, Drafting]:
    """The server's two steps: the cycles of its answers, and its own count."""
    config = patient.target.generation_config
    took = []
    counted = []
    with start_progress(len(texts), "prompts", "server") as progress:
        for text in texts:
            room = len(text.ids) - len(text.prompt)
            decoding = resolve(config, do_sample=False, max_new_tokens=room)
            cycles = AcceptanceCounts()
            answer = server.answer(text.prompt.tolist(), decoding, 0)
            for accepted in answer.drafts.accepted:
                cycles.count(accepted, server.facts.draft_tokens, accepted + 1)
            counted.append(cycles.line)
            tokens = {"tokens": answer.new_tokens - 1, "starts": answer.drafts.cycles}
            took.append({**cycles.line, **tokens})
            progress.update()
    return {"server": Drafting.of_prompts(took), "reported": Drafting.of_prompts(counted)}


def climb(patient: Patient, texts: list[LearntText]) -> None:
    """Adds the ladder's steps, and what each step loses."""
    symptoms = patient.symptoms
    steps = patient.steps
    chain = chain_of(patient.drafter, patient.levels)
    steps["teacher_forced"] = patient.teacher_forced(texts)
    steps["chain"] = decoded(patient.target, chain, texts, "chain")
    try:
        tree = patient.usual_tree()
        if tree.is_chain:
            raise UserError("the published method of this kind drafts a chain")
        steps["tree"] = decoded(patient.target, tree, texts, "tree")
    except UserError as error:
        symptoms.absent["ladder.tree"] = str(error)
    if patient.server is None:
        symptoms.absent["ladder.server"] = "no server was named (--server URL)"
    else:
        prompts = [text.prompt.tolist() for text in texts[:ASKED_FIRST]]
        decoding = resolve(patient.target.generation_config, do_sample=False, max_new_tokens=16)
        require_same_target(patient.server, patient.target, prompts, decoding)
        steps |= served(patient, patient.server, texts)
    for name, step in steps.items():
        symptoms.add(f"ladder.{name}", estimates(step))
        if name in DROPS:
            drop, above = DROPS[name]
            symptoms.add(f"drop.{drop}", estimates(steps[above], step))


def examine_training(patient: Patient, texts: list[LearntText]) -> None:
    """Adds the head's acceptance on its training text, and the scores in the head's files."""
    facts = head_facts(patient.head)
    patient.symptoms.add("recorded", {name: facts.get(name) for name in SCORES})
    if not patient.trained_on:
        patient.symptoms.absent["training"] = "no training text was named (--trained-on FILE)"
        return
    drafting = patient.teacher_forced(patient.trained_on[: len(texts)])
    patient.symptoms.add("training.teacher_forced", estimates(drafting))
