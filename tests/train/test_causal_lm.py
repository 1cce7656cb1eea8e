"""Laws of training a small LM: transformers' own loss, padding is nothing, the result is an ordinary directory."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aerie.configs.errors import UserError
from aerie.configs.schema.target_and_head import DraftLMSection
from aerie.data.batches import collate
from aerie.train.objectives.lm import CausalLM, CausalLMObjective, new_causal_lm, save_causal_lm
from tests import tiny

SIZES = DraftLMSection(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    max_position_embeddings=64,
)


def test_the_loss_is_transformers_own_on_the_learnt_tokens() -> None:
    lm, rows, objective = tiny.llama(num_blocks=2), tiny.rows(3), CausalLMObjective()
    output = objective(CausalLM(lm, chunk=4096), collate(rows, [0, 1, 2]))
    total, count = 0.0, 0
    for row in rows:
        labels = row.input_ids.masked_fill(row.turns == 0, -100)[None]
        learnt = int((row.turns[1:] != 0).sum())
        total += lm(input_ids=row.input_ids[None], labels=labels).loss.item() * learnt
        count += learnt
    _, found, slots = output.terms["cross_entropy"]
    assert slots.item() == count == objective.divisors(collate(rows, [0, 1, 2]))["cross_entropy"]
    assert found.item() == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("chunk", [4096, 3])
def test_padding_and_chunks_move_neither_loss_nor_gradient(chunk: int) -> None:
    rows, objective = tiny.rows(4), CausalLMObjective()
    found = []
    for groups, slots in (([[0], [1], [2], [3]], 4096), ([[0, 1, 2, 3]], chunk)):
        module = CausalLM(tiny.llama(num_blocks=2).train(), slots)
        losses = []
        for group in groups:
            loss = objective(module, collate([rows[n] for n in group], group)).total()
            loss.backward()
            losses.append(loss.detach())
        gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
        found.append((torch.stack(losses).sum(), gradient))
    assert found[1][0].item() == pytest.approx(found[0][0].item(), rel=1e-6)
    assert (found[1][1] - found[0][1]).norm() <= 2e-6 * found[0][1].norm()


def test_a_new_lm_has_tied_ends_the_tokenizers_vocabulary_and_depends_on_its_seed_alone() -> None:
    tokenizer = tiny.tokenizer()
    first, again, other = (new_causal_lm(SIZES, tokenizer, seed) for seed in (0, 0, 1))
    assert first.get_input_embeddings().weight is first.get_output_embeddings().weight
    assert first.config.vocab_size == len(tokenizer)
    weight = first.get_input_embeddings().weight
    assert weight.equal(again.get_input_embeddings().weight)
    assert not weight.equal(other.get_input_embeddings().weight)


def test_the_saved_directory_is_an_ordinary_one(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    lm = new_causal_lm(SIZES, tokenizer, 0).eval()
    save_causal_lm(lm, tokenizer, tmp_path / "lm")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "lm")
    ids = torch.arange(5, 15)[None]
    assert loaded(ids).logits.equal(lm(ids).logits)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path / "lm").chat_template == tokenizer.chat_template
    assert (tmp_path / "lm/model.safetensors").stat().st_mode & 0o044  # readable for the group


def test_init_from_goes_on_with_an_existing_lm_and_refuses_a_missing_one(tmp_path: Path) -> None:
    path = tiny.target(tmp_path / "target")
    settings = DraftLMSection(init_from=str(path))
    assert new_causal_lm(settings, tiny.tokenizer(), 0).config.num_hidden_layers == 4
    with pytest.raises(UserError, match=r"head\.init_from"):
        new_causal_lm(DraftLMSection(init_from=str(tmp_path / "none")), tiny.tokenizer(), 0)
