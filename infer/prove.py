"""The proof that methods are lossless: greedy answers of a real target, sampled answers of one in miniature.

Greedy: every answer equals transformers' generate(do_sample=False), token for token. Sampled: thousands of short
answers fit the law that enumeration gives them.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.progress import bar
from infer.config import Method, MethodConfig, PromptsConfig, SamplingConfig, TreeChanges
from infer.decoders import Drafters, make_decoder
from infer.enumeration import Answer, answer_law, draw_answers, p_value
from infer.greedy import GreedyResult, compare_greedy, reference
from infer.guess_config import LookaheadConfig
from infer.hardware import default_device
from infer.miniature import write_miniature
from infer.proof import ALPHA, SETTINGS, Law, Proof, Row, conclude
from infer.remembered import remember
from infer.stops.config import HeuristicConfig, MarginalGainConfig, ProbabilitySumConfig, VoteConfig
from infer.tasks import encode, load_prompts
from model.config import TargetConfig
from model.errors import UserError
from model.target import Target, load_tokenizer

LENGTH = 4  # new tokens of a sampled answer; with fewer no tree has a second level, and no stop rule a say
LONGER: dict[Method, int] = {"sps-heuristic": 5}  # its second draft is the first to depend on what was accepted
# what ends trees of two levels now and then, as the published thresholds do deeper ones
EARLY_VOTE = VoteConfig(probability_threshold=0.7, momentum_threshold=0.7, declines=1)
SMALL = TreeChanges(k=2, nodes=5)  # of a vocabulary of 8 the published trees would hold nearly everything
MINIATURES: dict[Method, MethodConfig] = {
    "sps-heuristic": MethodConfig("sps-heuristic", TreeChanges(stop=HeuristicConfig(start=2))),
    "eagle2": MethodConfig("eagle2", SMALL),
    "eagle3": MethodConfig("eagle3", SMALL),
    "deagle": MethodConfig("deagle", replace(SMALL, stop=EARLY_VOTE)),
    "svip": MethodConfig("svip", SMALL),
    "ddd": MethodConfig("ddd", replace(SMALL, stop=ProbabilitySumConfig(checks=(1, 2), threshold=0.7))),
    "opt-tree": MethodConfig("opt-tree", replace(SMALL, stop=MarginalGainConfig(threshold=0.7))),
    "lookahead": MethodConfig(
        "lookahead", lookahead=LookaheadConfig(ngram=3, window=5, guesses=7, pool_from_text=True)
    ),
}
TASKS = (
    "Explain in two sentences what you know about",
    "List three facts about",
    "Write a short story about",
    "Write a Python function that has to do with",
    "Count to ten, and then say something about",
    "Name five words that go with",
)
TOPICS = ("the sea", "prime numbers", "a bicycle", "bread")


class GreedyProver:
    """Compares greedy answers on one target."""

    def __init__(self, config: TargetConfig, prompts: PromptsConfig | None, count: int) -> None:
        """The first prompts of a file, or questions of its own; transformers answers them here."""
        self.target = Target.load(config, default_device())
        self._drafters = Drafters(self.target)
        tokenizer = load_tokenizer(config)
        texts = [f"{task} {topic}." for topic in TOPICS for task in TASKS][:count]
        if prompts is not None:
            texts = [prompt.text for prompt in load_prompts(replace(prompts, num_prompts=count))[:count]]
        self.references = []
        with bar(len(texts), "prompts", "generate") as progress:
            for text in texts:
                self.references.append(reference(self.target, _ids(text, tokenizer, self.target)))
                progress.update()

    @property
    def is_exact(self) -> bool:
        """Whether a difference is a failure whatever its size."""
        return self.target.dtype == torch.float32

    def prove(self, row: Row, tick: Callable[[], object] = lambda: None) -> GreedyResult:
        """The row's answers beside the target's own; tick is called once a prompt."""
        return compare_greedy(make_decoder(self._drafters, row.asked, row.head), self.references, tick)


class SampledProver:
    """Compares sampled answers with their law, on a miniature that it writes into a directory."""

    def __init__(self, directory: Path) -> None:
        self.target = Target.load(write_miniature(directory))
        self._heads = directory / "heads"
        self._drafters = Drafters(self.target)
        self._laws: dict[tuple[int, SamplingConfig], dict[Answer, float]] = {}
        # every token once, and n-grams that come back
        self.ids = torch.tensor([[1, 5, 3, 4, 1, 6, 3, 2, 7, 0, 5, 4, 2, 6, 1, 7, 3, 0, 4]])

    def prove(
        self, row: Row, sampling: SamplingConfig, draws: int, seed: int, tick: Callable[[], object] = lambda: None
    ) -> Law:
        """How well so many answers fit; tick is called once an answer."""
        length = LONGER.get(row.asked.method, LENGTH)
        if (length, sampling) not in self._laws:
            self._laws[length, sampling] = answer_law(self.target, self.ids, length, sampling)
        head = None if row.kind is None else str(self._heads / row.kind)
        decoder = remember(make_decoder(self._drafters, MINIATURES.get(row.asked.method, row.asked), head))
        seen, accepted = draw_answers(decoder, self.ids, draws, length, sampling, seed, tick)
        fit = p_value(self._laws[length, sampling], seen)
        return Law(sampling.temperature, sampling.top_p, fit, accepted)


def prove(rows: Sequence[Row], greedy: GreedyProver, draws: int, seed: int) -> list[Proof]:
    """The proof of every row, its sampled part from so many answers at each setting."""
    tested = [row for row in rows if row.is_testable]
    level = ALPHA / max(1, len(tested) * len(SETTINGS))
    steps = len(tested) * draws * len(SETTINGS) + sum(row.has_all for row in tested) * len(greedy.references)
    proofs = []
    with tempfile.TemporaryDirectory() as directory, bar(steps, "answers", "verify") as progress:
        sampled = SampledProver(Path(directory))
        for row in rows:
            result = greedy.prove(row, progress.update) if row.is_testable and row.has_all else None
            settings = SETTINGS if row.is_testable else ()
            laws = tuple(sampled.prove(row, each, draws, seed, progress.update) for each in settings)
            proofs.append(conclude(row, result, laws, level, greedy.is_exact))
    return proofs


def _ids(text: str, tokenizer: Any, target: Target) -> Tensor:
    """A prompt [1, T] in the target's chat template, or as it is where there is none."""
    if getattr(tokenizer, "chat_template", None) is not None:
        return encode(text, tokenizer, target)
    ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError(f"{target.recipe.path}: its tokenizer makes nothing of {text!r}; give a recipe with prompts")
    return torch.tensor([ids], device=target.device)
