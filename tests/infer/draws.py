"""Sampled answers of a real tiny model against the target's exact law over them."""

from torch import Tensor

from aerie.configs.schema.measure import SamplingConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Proposer
from aerie.infer.measure.lossless import answer_law, draw_answers, p_value, remember
from aerie.model.target import Target
from tests import tiny

LEVEL = 1e-5  # a right law's draws fit it worse once in 100,000 tests, whatever draws a machine's rounding makes


def tiny_vocabulary(num_blocks: int = 2) -> Target:
    """A target of 12 tokens that never ends."""
    model = tiny.llama(vocab_size=12, hidden_size=16, num_blocks=num_blocks, eos_token_id=None, pad_token_id=None)
    return Target(model, TargetConfig("tiny"))


def draw(
    target: Target, proposer: Proposer, ids: Tensor, draws: int, length: int, temperature: float, top_p: float
) -> tuple[float, float]:
    """p of the draws under the exact law, and accepted tokens per draw."""
    sampling = SamplingConfig(temperature, top_p=top_p)
    decoder = remember(SpeculativeDecoder(target, proposer))
    seen, accepted = draw_answers(decoder, ids, draws, length, sampling, seed=3)
    return p_value(answer_law(target, ids, length, sampling), seen), accepted
