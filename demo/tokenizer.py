"""Train the byte-level BPE tokenizer on the text of the little world."""

import random
from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo.mixture import LEARN
from demo.phrasing import typed
from demo.styles import STYLES
from demo.world import draw

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{{ message['content'] | trim }}<|end|>"
    "{% elif message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'] | trim }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def corpus(seed: int, count: int) -> Iterator[str]:
    """Text with about the same mixture as the training samples."""
    rng = random.Random(seed)
    styles = list(STYLES.values())
    for item in draw(rng, count, LEARN):
        yield typed(rng.choice(item.prompts), rng)
        yield item.answer
        yield rng.choice(styles)(item)
        if item.prompts_es:
            yield typed(rng.choice(item.prompts_es), rng)


def train_tokenizer(seed: int, vocab_size: int, count: int = 40_000) -> PreTrainedTokenizerFast:
    """Train and wrap the tokenizer.

    All 256 byte symbols are in the alphabet, so any text can be typed; digits stay single, so
    that a sum beyond the known tables looks like one.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus(seed, count), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=512,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
