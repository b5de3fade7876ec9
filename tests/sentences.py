"""A tiny model whose tokenizer knows the words of the generated tasks: most are one token."""

from __future__ import annotations

from functools import cache

from folders import byte_tokenizer
from tiny import tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvatlas.engine.lm import LM
from kvatlas.quality.question import Footprint, Question, Reply
from kvatlas.quality.retention.facts import all_values, kinds
from kvatlas.quality.retention.fillers import own_turns

CHAT = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)


@cache
def word_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs merged on the project's own sentences; each digit is a token, and so is the space before a number."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    text = [f"{turn.said}\n{turn.answered}" for turn in own_turns()] + [f" {value}" for value in all_values()] * 9
    text += [f"{fact.tell} {fact.reply} {fact.ask} {fact.prime}" for facts in kinds().values() for fact in facts]
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@cache
def sentences_lm(positions: int = 8192, chat: bool = False, words: bool = True) -> LM:
    """Knows no language, but has the positions and the vocabulary. Without ``words`` each byte is a token."""
    tokenizer = word_tokenizer() if words else byte_tokenizer()
    if chat:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer()._tokenizer, eos_token="</s>")
        tokenizer.chat_template = CHAT
    model = tiny_model("llama", vocab_size=3000, max_position_embeddings=positions)
    return LM(model, tokenizer)


def replied(lm: LM, question: Question, text: str, candidates: tuple[float, ...] = ()) -> Reply:
    """A reply that says ``text``."""
    given = candidates or tuple(-1.0 - i for i in range(len(question.candidates)))
    written = tuple(lm.tokenizer(text, add_special_tokens=False)["input_ids"])
    return Reply((), (), given, written, Footprint(1.0, 1.0, 1.0, 1.0, 1.0))
