"""Task definitions for local records: the words of lm-eval's own tasks, so that the prompts are the same.

A test holds them against the installed lm-eval. Records come in the hub's shape (`records.py` sees to it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ANSWERED = "Question: {{question}}\nAnswer:"
ACC = ("acc",)
ACC_NORM = ("acc", "acc_norm")


def winogrande_gold(doc: Mapping[str, Any]) -> int:
    """Which context is right: where the choices are contexts, lm-eval asks the text for it."""
    return {"1": 0, "2": 1}[doc["answer"]]


def winogrande_rest(doc: Mapping[str, Any]) -> str:
    """What follows the blank, which is scored."""
    return doc["sentence"].partition("_")[2].strip()


def winogrande_contexts(doc: Mapping[str, Any]) -> list[str]:
    """The text up to the blank, filled in either way."""
    before = doc["sentence"].partition("_")[0]
    return [before + doc["option1"], before + doc["option2"]]


def copa_text(doc: Mapping[str, Any]) -> str:
    """The premise without its full stop, and a connector."""
    return doc["premise"].strip()[:-1] + {"cause": " because", "effect": " therefore"}[doc["question"]]


def copa_choices(doc: Mapping[str, Any]) -> list[str]:
    """Both ends of the sentence. lm-eval's begin with a space of their own, after its delimiter."""
    return [" " + doc[key][0].lower() + doc[key][1:] for key in ("choice1", "choice2")]


def copa_target(doc: Mapping[str, Any]) -> str:
    return copa_choices(doc)[0 if doc["label"] == 0 else 1]


_ARC = {
    "doc_to_text": ANSWERED,
    "doc_to_target": "{{choices.label.index(answerKey)}}",
    "doc_to_choice": "{{choices.text}}",
    "test_split": "test",
}
_ASKED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "hellaswag": (
        ACC_NORM,
        {"doc_to_text": "{{query}}", "doc_to_target": "{{label}}", "doc_to_choice": "choices"},
    ),
    "piqa": (
        ACC_NORM,
        {
            "doc_to_text": "Question: {{goal}}\nAnswer:",
            "doc_to_target": "label",
            "doc_to_choice": "{{[sol1, sol2]}}",
        },
    ),
    "boolq": (
        ACC,
        {
            "doc_to_text": "{{passage}}\nQuestion: {{question}}?\nAnswer:",
            "doc_to_target": "label",
            "doc_to_choice": ["no", "yes"],
        },
    ),
    "openbookqa": (
        ACC_NORM,
        {
            "doc_to_text": "question_stem",
            "doc_to_target": "{{choices.label.index(answerKey.lstrip())}}",
            "doc_to_choice": "{{choices.text}}",
            "test_split": "test",
        },
    ),
    "winogrande": (
        ACC,
        {
            "doc_to_text": winogrande_gold,
            "doc_to_target": winogrande_rest,
            "doc_to_choice": winogrande_contexts,
        },
    ),
    "arc_easy": (ACC_NORM, _ARC),
    "arc_challenge": (ACC_NORM, _ARC),
    "copa": (ACC, {"doc_to_text": copa_text, "doc_to_target": copa_target, "doc_to_choice": copa_choices}),
    "rte": (
        ACC,
        {
            "doc_to_text": "{{sentence1}}\nQuestion: {{sentence2}} True or False?\nAnswer:",
            "doc_to_target": "label",
            "doc_to_choice": ["True", "False"],
        },
    ),
}


def measured(name: str) -> tuple[str, ...]:
    """lm-eval's metrics of a task; the first leads."""
    return _ASKED[name][0]


def definition(name: str, scored: Sequence[dict[str, Any]], examples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What lm-eval's ``ConfigurableTask`` takes: records to score, and those that few-shot examples are drawn from."""
    from datasets import Dataset

    metrics, asked = _ASKED[name]
    split = asked.get("test_split", "validation")
    data = {split: Dataset.from_list(list(scored)), "train": Dataset.from_list(list(examples))}
    if split == "test":  # lm-eval's own has one too; nothing of it is read
        data["validation"] = data["train"]
    return {
        "task": name,
        "output_type": "multiple_choice",
        "custom_dataset": lambda **_: data,
        "training_split": "train",
        "validation_split": "validation",
        "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics],
        **asked,
    }
