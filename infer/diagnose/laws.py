"""Compares the target's and the head's distributions along texts: is a first draft accepted?"""

from collections.abc import Sequence

import pandas as pd
import torch

from aerie.data.progress import start_progress
from aerie.infer.decode.roles import Drafter
from aerie.infer.decode.sampling import entropy
from aerie.infer.diagnose.answers import LearntText, StatedText
from aerie.infer.measure.bootstrap import Estimate, Side, estimate
from aerie.model.kv_cache import KeptRows
from aerie.model.target import Target


@torch.inference_mode()
def score_texts(
    target: Target, drafter: Drafter, texts: Sequence[StatedText], temperatures: Sequence[float]
) -> pd.DataFrame:
    """A line for each token of an answer that can be a draft's first token.

    Columns: `row`, the text's number; `length`, the tokens read before the draft; the target's
    `entropy` and its likeliest `token`; `inside`, whether the draft vocabulary has that token.
    `accept_at` names a column for each temperature: the chance that the target accepts the draft's
    first token. At 0 it is whether both choose the same token, else it is 1 - TV(p, q).
    """
    tables = []
    with start_progress(len(texts), "answers", "laws") as progress:
        for number, text in enumerate(texts):
            if drafts_in(text.text):
                tables.append(_score_text(target, drafter, text, temperatures).assign(row=number))
            progress.update()
    return pd.concat(tables, ignore_index=True)


def drafts_in(text: LearntText) -> bool:
    """Whether a token of the text can be drafted, which an answer's first token cannot."""
    return int((text.turn_ids > 0).sum()) > 1


def _score_text(
    target: Target, drafter: Drafter, text: StatedText, temperatures: Sequence[float]
) -> pd.DataFrame:
    ids = text.text.ids.to(target.device)  # [T]
    turns = text.text.turn_ids
    # The last token that was read, the root and the drafted token belong to one answer.
    starts = ((turns[:-1] == turns[1:]) & (turns[:-1] > 0)).nonzero()[:, 0].tolist()
    batch = text.batch(drafter.after_blocks)
    states = (batch.features if batch.taps is None else batch.taps)[0]  # [T, D or L*D]
    kept = KeptRows(len(ids), target.device, target.dtype)
    drafter.reset(ids[: starts[0]], kept, 1)
    laws = []
    for start in starts:
        read = kept.length
        drafter.commit(ids[read + 1 : start + 1], states[read:start])
        kept.advance(start - read)
        laws.append(drafter.start())
    log_q = torch.cat(laws).double()  # [n, Vd]
    logits = target.logits(text.last_hidden[starts]).double()  # [n, V]
    token_of = drafter.target_ids(torch.arange(log_q.shape[1], device=ids.device))  # [Vd]
    choice = logits.argmax(-1)
    columns = {
        "length": torch.tensor(starts) + 1,
        "entropy": entropy(logits.softmax(-1)),
        "token": choice,
        "inside": torch.isin(choice, token_of),
    }
    for temperature in temperatures:
        if temperature:
            p = (logits / temperature).softmax(-1)[:, token_of]
            q = (log_q / temperature).softmax(-1)
            accepted = torch.minimum(p, q).sum(-1)
        else:
            accepted = (token_of[log_q.argmax(-1)] == choice).double()
        columns[accept_at(temperature)] = accepted
    return pd.DataFrame({name: values.cpu().numpy() for name, values in columns.items()})


def accept_at(temperature: float) -> str:
    return f"accept_{temperature:g}"


def mean_over_texts(table: pd.DataFrame, column: str) -> Estimate | None:
    """The mean of a column over tokens, with its 95 % interval over texts."""
    sums = table.assign(starts=1.0).groupby("row")[["starts", column]].sum()
    return estimate([Side(sums, lambda sums: sums[..., 1] / sums[..., 0])])
