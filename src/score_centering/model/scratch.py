"""A model with fresh weights: a byte-level BPE tokenizer trained on the task's own text, and transformers' classes."""

from collections.abc import Iterable

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from score_centering.settings import UserError
from score_centering.settings.model_blocks import Scratch

# transformers' config and model class of each architecture
CLASSES = {
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
}
PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of exactly `vocab_size` tokens; runs of digits never merge with other text.

    Where the texts hold fewer merges than asked for, reserved tokens fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d+|\D+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(scratch: Scratch, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A Qwen3.5 text model, dense or a mixture of experts, with weights drawn from `scratch.seed`, in FP32.

    Raises:
        UserError: a parameter that transformers' config class does not know.
    """
    config_class, model_class = (getattr(transformers, name) for name in CLASSES[scratch.architecture])
    parameters = {name: value for name, value in scratch.parameters.items() if value is not None}
    unknown = sorted(parameters.keys() - config_class().to_dict().keys())
    if unknown:
        raise UserError(
            f"model.scratch.parameters: unknown {', '.join(unknown)} (see transformers' {config_class.__name__})"
        )
    config = config_class(
        **parameters,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(scratch.seed)
        return model_class(config)
