"""Made-up records of the reasoning tasks: as the local files have them, and the same as the hub has them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

DATA = Path(os.environ.get("KVATLAS_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
Row = dict[str, Any]

WHO = ("Ana", "Bob", "Cy", "Dee", "Eve", "Flo", "Gus", "Hal", "Ida", "Jon")
THINGS = ("a red kite", "two old keys", "the tall lamp", "some warm bread", "a paper boat", "one green pear", "a drum")


def _hellaswag(i: int) -> tuple[Row, Row]:
    label, first, rest = "Making things", f"{WHO[i % 10]} number {i} has {THINGS[i % 7]} [step] here.", "Then it"
    endings = [f"goes to {WHO[(i + j) % 10]}  [title] at {j}." for j in range(4)]
    return (
        {"ind": i, "ctx": f"{label}: {first} {rest}", "endings": endings, "label": i % 4},
        {"activity_label": label, "ctx_a": first, "ctx_b": rest.lower(), "endings": endings, "label": str(i % 4)},
    )


def _piqa(i: int) -> tuple[Row, Row]:
    row = {"goal": f"How to lift {THINGS[i % 7]} {i}?", "sol1": f"Use {WHO[i % 10]}.", "sol2": "Use a rope, slowly."}
    return {**row, "label": i % 2}, {**row, "label": i % 2}


def _boolq(i: int) -> tuple[Row, Row]:
    row = {"passage": f"{WHO[i % 10]} holds {THINGS[i % 7]} in room {i}.", "question": f"is it in room {i + i % 2}"}
    return {**row, "idx": i, "label": i % 2 == 0}, {**row, "idx": i, "label": int(i % 2 == 0)}


def _several(text: str, before: str = "") -> Callable[[int], tuple[Row, Row]]:
    def make(i: int) -> tuple[Row, Row]:
        asked, texts = f"What has {WHO[i % 10]} in box {i}?", [THINGS[(i + j) % 7] for j in range(4)]
        hub = {text: asked, "choices": {"text": texts, "label": list("ABCD")}, "answerKey": "ABCD"[i % 4]}
        return {"query": before + asked, "choices": texts, "gold": i % 4}, hub

    return make


def _winogrande(i: int) -> tuple[Row, Row]:
    one, other = WHO[i % 10], WHO[(i + 1) % 10]
    before = "" if i == 0 else f"{one} gave {other} the box number {i} because "
    row = {"context_options": [before + one, before + other], "continuation": f"liked {THINGS[i % 7]}.", "gold": i % 2}
    hub = {"sentence": f"{before}_ {row['continuation']}", "option1": one, "option2": other, "answer": str(1 + i % 2)}
    return row, hub


def _copa(i: int) -> tuple[Row, Row]:
    row = {
        "premise": f"{WHO[i % 10]} took {THINGS[i % 7]} {i}.", "choice1": "It was near.", "choice2": "Rain fell on it.",
        "question": ("cause", "effect")[i % 2], "label": i % 2, "idx": i,
    }  # fmt: skip
    return row, row


def _rte(i: int) -> tuple[Row, Row]:
    premise, hypothesis = f"{WHO[i % 10]} sold {THINGS[i % 7]} on day {i}.", f"It was day {i + i % 2}."
    return (
        {"premise": premise, "hypothesis": hypothesis, "label": ("entailment", "not_entailment")[i % 2], "idx": i},
        {"sentence1": premise, "sentence2": hypothesis, "label": i % 2, "idx": i},
    )


MADE: dict[str, tuple[str, Callable[[int], tuple[Row, Row]]]] = {
    "hellaswag": ("hellaswag_val.jsonl", _hellaswag),
    "piqa": ("piqa/valid.jsonl", _piqa),
    "boolq": ("boolq_val.jsonl", _boolq),
    "openbookqa": ("openbook_qa.jsonl", _several("question_stem")),
    "winogrande": ("sub/winogrande.jsonl", _winogrande),
    "arc_easy": ("arc_easy.jsonl", _several("question", "Question: ")),
    "arc_challenge": ("arc_challenge.jsonl", _several("question", "Question: ")),
    "copa": ("copa_val.jsonl", _copa),
    "rte": ("rte_val.jsonl", _rte),
}


def local(name: str, numbers: Sequence[int]) -> list[Row]:
    """Records as a local file has them."""
    return [MADE[name][1](i)[0] for i in numbers]


def hub(name: str, numbers: Sequence[int]) -> list[Row]:
    """The same records as the hub has them."""
    return [MADE[name][1](i)[1] for i in numbers]


def write(folder: Path, name: str, rows: Sequence[Row]) -> Path:
    """A task's file in a data folder; PIQA's labels go into a file of their own."""
    path = folder / MADE[name][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "piqa":
        path.with_name("valid-labels.lst").write_text("".join(f"{row['label']}\n" for row in rows))
        rows = [{key: value for key, value in row.items() if key != "label"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for the tiny models: one token a byte, the newline's twin as the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=letters[255], pad_token=letters[254])
