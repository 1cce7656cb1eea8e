"""`aerie diagnose`: reads what to examine, and writes the diagnosis."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from aerie.configs.errors import UserError
from aerie.configs.read import validate
from aerie.configs.schema.data import RenderConfig
from aerie.configs.schema.decode import ServedConfig
from aerie.configs.schema.heads import TargetConfig
from aerie.configs.schema.measure import BenchConfig, PromptsConfig, SamplingConfig
from aerie.configs.schema.recipe import Recipe, load, pairs_of
from aerie.infer.command_inputs import (
    prompts_or_held_out,
    render_config,
    require_decodable,
    target_of,
)
from aerie.model import storage

LEAST_PROMPTS = 4  # fewer prompts give no intervals


class Examined(NamedTuple):
    """What the command line names."""

    recipe: Recipe | None
    target: TargetConfig
    head: str
    prompts: PromptsConfig


def diagnose(arguments: Namespace, unknown: list[str]) -> int:
    """say why a head is accepted less than it should be: the cause, its evidence and the fix"""
    examined = _examined(arguments, unknown)
    root = examined.recipe.root if examined.recipe else Path()
    output = arguments.out or root / storage.DIAGNOSIS
    if arguments.plan:
        print(f"diagnose: {examined.head} for {examined.target.path} -> {output}")
        return 0
    from aerie.infer.diagnose import examine
    from aerie.infer.diagnose.verdict import page

    patient = _patient(arguments, unknown, examined)
    diagnosis = examine(patient)
    text = page(diagnosis, patient.symptoms)
    facts = {"head": examined.head, "target": examined.target.path, **vars(diagnosis)}
    facts |= {"page": text, **patient.symptoms.as_json()}
    storage.write_json(output, facts)
    print(json.dumps(facts, indent=1) if arguments.json else text)
    if arguments.mend is not None:
        patient.mend(arguments.mend)
    return 0


def _examined(arguments: Namespace, unknown: list[str]) -> Examined:
    """What the arguments name; UserError if something is missing."""
    if arguments.num_prompts < LEAST_PROMPTS:
        raise UserError(
            f"--num-prompts must be at least {LEAST_PROMPTS}, not {arguments.num_prompts}: "
            "fewer prompts give no intervals"
        )
    if arguments.mend and arguments.mend.exists():
        raise UserError(f"--mend {arguments.mend}: exists already; name a new directory")
    prompts = PromptsConfig(str(arguments.prompts)) if arguments.prompts else None
    recipe = None
    if not prompts and not arguments.config and arguments.head:
        stored = arguments.head.absolute().parents[1] / "recipe.yaml"  # the head's run
        arguments.config = stored if stored.is_file() else None
    if arguments.config:
        recipe = load(arguments, unknown)
        target = recipe.target
        head = str(arguments.head or recipe.head_output)
        section = recipe.bench or recipe.calibrate or BenchConfig()
        prompts = prompts or prompts_or_held_out(section.prompts, recipe, 0)
    elif arguments.target and arguments.head and prompts:
        pairs = [pair for pair in pairs_of(unknown) if pair.startswith("target.")]
        target = target_of(arguments, pairs)
        head = str(arguments.head)
    else:
        raise UserError("diagnose needs --config RECIPE, or --target, --head and --prompts FILE")
    prompts = replace(prompts, turns=1, num_prompts=arguments.num_prompts)
    from aerie.infer.measure.tasks import check_sources

    check_sources(prompts)
    require_decodable(target, [head])
    if arguments.trained_target:
        require_decodable(replace(target, path=arguments.trained_target, revision=None), [])
    if arguments.temperature is not None:
        validate({"temperature": arguments.temperature}, SamplingConfig, "--temperature", {})
    return Examined(recipe, target, head, prompts)


def _patient(arguments: Namespace, unknown: list[str], examined: Examined) -> Any:
    """The loaded target, the head, and the texts on which they are measured."""
    from aerie.data.rendering import fix_date, recipe_tokenizer
    from aerie.infer.decode.sampling import resolve
    from aerie.infer.diagnose.patient import Patient, trained_texts
    from aerie.infer.measure.bench import load_quietly
    from aerie.infer.measure.server import Server
    from aerie.infer.measure.tasks import load_prompts

    recipe, target, head, prompts = examined
    if recipe:
        render: RenderConfig = fix_date(recipe, is_stage=False).data
    else:
        pairs = [pair for pair in pairs_of(unknown) if not pair.startswith("target.")]
        render = render_config(head, pairs)
    tokenizer = recipe_tokenizer(target, render)
    questions = load_prompts(prompts)
    if len(questions) < LEAST_PROMPTS:
        raise UserError(f"diagnose needs at least {LEAST_PROMPTS} prompts, not {len(questions)}")
    # evenly spread, so that every task gives some
    questions = questions[:: -(-len(questions) // arguments.num_prompts)]
    conversations = [arguments.trained_on] if arguments.trained_on else []
    if recipe and not conversations:
        conversations = [path for path in map(Path, recipe.data.conversations) if path.is_file()]
    loaded = load_quietly(target, recipe.threads if recipe else None)
    temperature = arguments.temperature
    if temperature is None:  # servers use the generation_config's, too
        temperature = resolve(loaded.generation_config).temperature
    server = None
    if arguments.server:
        server = Server(ServedConfig("served", arguments.server), "--server")
    return Patient(
        loaded,
        tokenizer,
        head,
        questions,
        trained_texts(target, tokenizer, conversations[0], head) if conversations else [],
        temperature,
        arguments.trained_target,
        server,
    )
