"""Finds out why a head is accepted less than it should be: it measures, then applies rules."""

from collections.abc import Callable

from aerie.infer.diagnose.answers import LearntText, answer_greedily
from aerie.infer.diagnose.ladder import climb, examine_training
from aerie.infer.diagnose.patient import Patient
from aerie.infer.diagnose.readings import explain_server, read_otherwise
from aerie.infer.diagnose.text import examine_target, examine_text
from aerie.infer.diagnose.verdict import Diagnosis, find_cause

# Each examination measures on the target's own answers, and adds to the patient's symptoms.
Examination = Callable[[Patient, list[LearntText]], None]
EXAMINATIONS: tuple[Examination, ...] = (
    climb,
    read_otherwise,
    explain_server,
    examine_training,
    examine_target,
    examine_text,
)


def examine(patient: Patient) -> Diagnosis:
    """Runs all examinations, which fill in the patient's symptoms; returns the verdict."""
    if patient.symptoms.values:  # the head cannot be loaded
        return find_cause(patient.symptoms)
    texts = answer_greedily(patient.target, patient.prompt_ids())
    for examination in EXAMINATIONS:
        examination(patient, texts)
    return find_cause(patient.symptoms)
