"""Breaks verification, rejection, losses and loss masks line by line, which tests must notice.

python tests/mutants.py        prints a line for each mutant; exit code 1 if one survives

Each mutant gets a copy of the checkout, in which only the named tests run.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERIFY, TREE, STOP, SAMPLING = (
    f"infer/decode/{name}.py" for name in ("verify", "dynamic_tree", "stop", "sampling")
)
LOSSES = "train/losses.py"
CHAT, SAID, FORMS, TURNS, MARKS, VALUES, CONVERSATIONS, ROWS = (
    f"data/{name}.py" for name in "chat said forms turns marks values conversations rows".split()
)
TESTS = {
    VERIFY: ["tests/infer/test_verify.py", "tests/infer/test_recorder.py"],
    TREE: ["tests/infer/test_shape.py", "tests/infer/test_verify.py"],
    STOP: ["tests/infer/test_shape.py"],
    SAMPLING: ["tests/infer/test_verify.py"],
    LOSSES: ["tests/train/test_losses.py"],
    CHAT: ["tests/data/test_chat.py", "tests/data/test_templates.py"],
    SAID: ["tests/data/test_chat.py", "tests/data/test_templates.py"],
    FORMS: ["tests/data/test_chat.py", "tests/data/test_templates.py"],
    MARKS: ["tests/data/test_conversations.py", "tests/data/test_turns.py"],
    VALUES: ["tests/data/test_turns.py"],
    CONVERSATIONS: ["tests/data/test_conversations.py"],
    TURNS: ["tests/data/test_conversations.py", "tests/data/test_turns.py"],
    ROWS: ["tests/data/test_conversations.py", "tests/data/test_turns.py"],
}
MUTANTS = [  # file, a text that the file has once, its replacement
    (VERIFY, "tree.tokens != choice.index_select(0, tree.parents)", "tree.tokens < 0"),
    (VERIFY, "refused = refused | tree.passengers", "pass"),
    (
        VERIFY,
        "return _judged(tree, order, choice.index_select(0, order.nodes))",
        "return _judged(tree, order, choice[: len(order.nodes)])",
    ),
    (VERIFY, ".roll(-1)", ""),
    (VERIFY, "[:, 0] * takes_one", "[:, 0]"),
    (VERIFY, "(uniform < accept).byte().max(-1)", "(uniform < accept).byte().cumsum(-1).max(-1)"),
    (VERIFY, "p = p[:count].scatter_(1, refused, 0.0)", "p = p[:count]"),
    (VERIFY, "q = q[:count].scatter_(1, refused, 0.0)", "q = q[:count]"),
    (VERIFY, "c = q.sum(-1).clamp_(min=tiny)", "c = c[:count]"),
    (VERIFY, "s = s[:count].addcdiv(t[:count], c[:count])", "s = s[:count] + t[:count]"),
    (VERIFY, "* c / (q_x * t)", "* c / (q_x * t).sqrt()"),
    (VERIFY, "torch.where(is_there, accept.clamp_(max=1.0), 0.0)", "accept.clamp_(max=1.0)"),
    (VERIFY, "ranks[1:], node", "ranks[1:] * 0, node"),
    (
        VERIFY,
        "left = torch.addcmul(p, weight, q, value=-1).clamp_(min=0.0)",
        "left = torch.addcmul(p, weight, q, value=-1).abs_()",
    ),
    (VERIFY, "weight.index_select(0, row) * is_parent", "weight.index_select(0, row)"),
    (VERIFY, "(1.0 - accept).cumprod(-1)", "torch.ones_like(accept)"),
    # Drawn trees that rank by the token's q, put later draws first, or drop the least likely token.
    (SAMPLING, "return chances.masked", "return q.gather(-1, columns).log().masked"),
    (SAMPLING, "return chances.masked", "return chances.flip(-1).masked"),
    (
        SAMPLING,
        "return chances.masked",
        "return chances.scatter(-1, q.gather(-1, columns).argmin(-1, keepdim=True), -torch.inf)"
        ".masked",
    ),
    (SAMPLING, "dtype=torch.float64) * sums[:, -1:]", "dtype=torch.float64)"),
    (SAMPLING, "uniform, right=True)[:, 0]", "uniform, right=True)[:, 0].sub(1).clamp_(min=0)"),
    (TREE, "if stop.keeps_tree:", "if True:"),
    (TREE, "stable=True).indices[: self.nodes]", "stable=False).indices[: self.nodes].flip(0)"),
    (TREE, "above = level.frontier_survival", "above = level.survival[: len(frontier)]"),
    (STOP, "return next_best <= last_chosen", "return next_best <= last_chosen + 0.1"),
    (LOSSES, "beta=1.0).mean(-1)", "beta=1.0).sum(-1)"),
    (LOSSES, "-(law.inside.exp() * log_q).sum(-1)", "-(log_q.exp() * log_q).sum(-1)"),
    (LOSSES, "(log_p.exp() * (log_p - log_q)).sum(-1)", "(log_q.exp() * (log_q - log_p)).sum(-1)"),
    (LOSSES, "math.log1p(-beta)", "math.log(beta)"),
    (LOSSES, "torch.minimum(log_q, log_p).exp()", "torch.maximum(log_q, log_p).exp()"),
    (LOSSES, "_eta * alpha.detach()", "_eta * alpha"),
    (LOSSES, "logits.float().logsumexp(-1) - log_normaliser", "0 * log_normaliser"),
    (CHAT, "if first > 0 and ends[first - 1] > start:", "if False:"),
    (CHAT, "turn_ids[first : last + 1]", "turn_ids[first + 1 : last + 2]"),
    (
        CHAT,
        "answer.stop):\n            if ids[position] in self.end_ids",
        "answer.stop):\n            if ids[position] in self.special_ids",
    ),
    (CHAT, "                is_one_text = False\n", ""),
    (CHAT, "start, said_end, len(text))", "0, said_end, len(text))"),
    # The template loses a word of a row: of an answer, of its context, or of a tool.
    (CHAT, "start + require_said(said, text[start:])", "len(text)"),
    (CHAT, "max(said, answer.start)", "answer.start"),
    (CHAT, "                said_end = start\n", ""),
    (CHAT, "require_said(context, text[len(before) : start])", "pass"),
    (SAID, "(conversation.tools or ()) if indices.start == 0 else ()", "()"),
    (SAID, "thoughts if with_thoughts else ()", "()"),
    (SAID, '*_leaves(call["function"]["arguments"])', ""),
    (CHAT, "if writes_python(message, text[start:]):", "if False:"),
    (CHAT, "if answer.stop < len(ids) and ids[answer.stop] in self.end_ids:", "if False:"),
    (CHAT, "text=rendered.text + closer", "text=rendered.text"),
    (CHAT, "if self._joins_answers(", "if False and self._joins_answers("),
    (CHAT, "self._require_short(conversation, index)", "pass"),
    (CHAT, "if any(number in text for number in _invented_ids(messages)):", "if False:"),
    (FORMS, 'result.setdefault("name", call["function"]["name"])', "pass"),
    (FORMS, 'text = json.dumps(function["arguments"], ensure_ascii=False)', "text = str(function)"),
    (FORMS, "results = [by_id[number] for number in ids]", "results = results[::-1]"),
    (FORMS, 'parts += [{**spoken, "tool_calls": [call]}, result]', "parts += [spoken, result]"),
    (MARKS, "message[IS_CONTEXT] = True", "pass"),
    (TURNS, "unread.add(f'{holder} key \"{key}\" is not read')", "pass"),
    (TURNS, "is_needed = key in UNREADABLE_KEYS or", "is_needed = False or"),
    (TURNS, 'yield "part", part, PART_KEYS_READ', "pass"),
    (VALUES, "values[key] = TwoValues()", "pass"),
    (CONVERSATIONS, 'message["role"] not in ("tool", "system")', 'message["role"] != "tool"'),
    (ROWS, "for key, part in value.items() if part is not None", "for key, part in value.items()"),
    (ROWS, "if isinstance(kind, JsonType) and isinstance(value, str):", "if False:"),
    (ROWS, "return value.date().isoformat()", "return value"),
]


def survives(number: int, directory: Path) -> bool:
    """Whether the file's tests pass with this mutant in place."""
    file, old, new = MUTANTS[number]
    source = (ROOT / file).read_text(encoding="utf-8")
    if source.count(old) != 1:
        raise SystemExit(
            f"{file}: has {old!r} {source.count(old)} times, not once; rewrite mutant {number}"
        )
    copy = directory / str(number)
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", ".*_cache", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    (copy / file).write_text(source.replace(old, new), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{copy / 'src'}:{copy}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS[file]]
    result = subprocess.run(
        command, check=False, cwd=copy, env=environment, capture_output=True, text=True
    )
    shutil.rmtree(copy)
    if result.returncode not in (0, 1):  # the tests did not run
        raise SystemExit(result.stdout + result.stderr)
    ending = "dies" if result.returncode else "SURVIVES"
    print(f"{ending}: {file}: {old.strip()} -> {new.strip()}", flush=True)
    return result.returncode == 0


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        alive = sum(survives(number, Path(directory)) for number in range(len(MUTANTS)))
    print(f"{len(MUTANTS) - alive} of {len(MUTANTS)} mutants die")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
