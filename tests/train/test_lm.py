"""Laws of training a small LM: transformers' loss, the target's laws, a standard directory."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from aerie.configs.schema.heads import DraftLMSection, DraftLMTrain, TargetConfig
from aerie.data.batches import collate
from aerie.model.target import Target
from aerie.train.lm import LMObjective, new_causal_lm, save_causal_lm
from tests import tiny


def target(vocab_size: int = 320) -> Target:
    return Target(tiny.llama(vocab_size=vocab_size, num_blocks=2, seed=3), TargetConfig("target"))


def draft(**sizes: Any) -> Any:
    return tiny.llama(num_blocks=1, seed=7, **sizes)


def test_loss_is_transformers() -> None:
    """The loss is transformers own on the learnt tokens."""
    lm, batch = tiny.llama(num_blocks=2), collate(tiny.rows(3), range(3))
    labels = batch.input_ids.masked_fill(batch.turn_ids == 0, -100)
    total, count = LMObjective(lm, None, DraftLMTrain())(batch).terms["cross_entropy"]
    assert count == (labels[:, 1:] >= 0).sum()
    assert (total / count).item() == pytest.approx(
        lm(input_ids=batch.input_ids, labels=labels).loss.item(), rel=1e-5
    )


def test_saved_directory(tmp_path: Path) -> None:
    """A new lm is saved as an ordinary directory and goes on from one."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config, tokenizer = DraftLMSection(max_position_embeddings=64, **sizes), tiny.tokenizer()
    lm = new_causal_lm(config, tokenizer, 0, len(tokenizer)).eval()
    weight = lm.get_input_embeddings().weight
    assert weight is lm.get_output_embeddings().weight
    save_causal_lm(tokenizer, lm, tmp_path)
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path), torch.arange(5, 15)[None]
    assert loaded(ids).logits.equal(lm(ids).logits)
    assert loaded.generation_config.eos_token_id == tokenizer.eos_token_id
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
    warm = new_causal_lm(DraftLMSection(init_from=str(tmp_path)), tokenizer, 0, 0)
    assert warm.get_input_embeddings().weight.equal(weight) and all(
        p.requires_grad for p in warm.parameters()
    )


@pytest.mark.parametrize(("drafts", "targets"), [(320, 340), (340, 320)])
def test_terms_of_plain_forwards(drafts: int, targets: int) -> None:
    """340 is a padded vocabulary (Qwen2.5 has two): the LM's softmax is over the common 320, the
    target's over all."""
    source, expected, count = (
        target(targets),
        torch.zeros(5),
        0,
    )  # cross-entropy, KL, correct, alpha, agreement
    states = [source.features(row.input_ids[None]).last_hidden[0] for row in tiny.rows(4)]
    rows = [
        replace(row, last_hidden=state.clone())
        for row, state in zip(tiny.rows(4), states, strict=True)
    ]
    objective = LMObjective(draft(vocab_size=drafts), source.vocab, DraftLMTrain(distill="kl"))
    for row in rows:
        with torch.no_grad():
            log_q = objective.head(row.input_ids[None]).logits[0, :, :320].log_softmax(-1)
            p = source.model(row.input_ids[None]).logits[0].softmax(-1)
        for position in (row.turn_ids[1:] != 0).nonzero()[:, 0].tolist():
            token, q, drafted = (
                row.input_ids[position + 1],
                log_q[position],
                int(log_q[position].argmax()),
            )
            inside = p[position, :320] / p[position, :320].sum()
            law_loss, alpha = (
                (inside * (inside.log() - q)).sum(),
                torch.minimum(q.exp(), p[position, :320]).sum(),
            )
            agrees = drafted == int(p[position].argmax())
            expected += torch.tensor([-q[token], law_loss, drafted == token, alpha, agrees])
            count += 1
    output = objective(collate(rows, range(4)))
    found = [value.detach().float() for value, _ in {**output.terms, **output.metrics}.values()]
    torch.testing.assert_close(torch.stack(found), expected, rtol=1e-4, atol=1e-4)
    assert (
        count == objective.counts(collate(rows, range(4)))["distill"] == output.terms["distill"][1]
    )
    # A padding id, for which the LM has no column, is read as its last token, and not learnt.
    odd = collate([replace(rows[0], input_ids=torch.full_like(rows[0].input_ids, 339))], [0])
    assert objective(odd).terms["cross_entropy"][0].item() == 0.0
