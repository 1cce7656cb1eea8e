"""A long trial of losslessness: random targets, heads, trees and prompts, greedy identity on every one."""

import pytest
import torch

from aerie.configs.schema.decode import ChainConfig, DynamicConfig, TreeConfig
from aerie.configs.schema.target_and_head import TargetConfig
from aerie.infer.decode.drafters.eagle import EagleDrafter
from aerie.infer.decode.engine import SpeculativeDecoder
from aerie.infer.decode.shape import Drafting, make_shape
from aerie.model.target import Target
from tests import tiny

TRIALS = 300


@pytest.mark.soak
@pytest.mark.slow
def test_random_targets_trees_and_prompts_are_decoded_losslessly() -> None:
    torch.set_num_threads(1)
    cycles = 0
    for seed in range(TRIALS):
        dice = torch.Generator().manual_seed(seed)

        def pick(low: int, high: int, dice: torch.Generator = dice) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=dice))

        target = Target(tiny.llama(seed=seed, num_blocks=pick(1, 4), eos_token_id=pick(0, 319)), TargetConfig("tiny"))
        head = tiny.head(target.vocab.embedding.float(), seed=seed, scale=float(pick(1, 12)))
        chain, levels, k, nodes = pick(0, 3) == 0, pick(1, 8), pick(1, 8), pick(2, 40)
        tree: TreeConfig = ChainConfig(levels=levels) if chain else DynamicConfig(levels=levels, k=k, nodes=nodes)
        ids = torch.randint(0, 320, (1, pick(1, 60)), generator=dice)
        new = pick(1, 40)
        own = target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        decoder = SpeculativeDecoder(target, Drafting(EagleDrafter(head.eval(), target), make_shape(tree)))
        ours = decoder.generate(ids, do_sample=False, max_new_tokens=new)
        assert ours.sequences.tolist() == own.tolist(), (seed, tree)
        cycles += ours.statistics.target_forwards
    assert cycles > TRIALS
