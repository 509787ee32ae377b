"""Real tokenizers over a small vocabulary: whole words of the prompts and templates, all else in pieces.

The byte-level ones know every word of the chat templates that pipelines wrap around a prompt as one token, as
the real ones do: Qwen-Image drops the first 34 (edit: 64) tokens as the template's, and here too they are it.
"""

# pyright: reportArgumentType=false
# (the libraries' constructors say less than they take)

import json
from functools import cache
from string import ascii_letters, digits, punctuation
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer, T5Tokenizer

CLIP_LENGTH = 77
PROMPTS = """
a an the of in on with and at to from by no not
red green blue yellow white black grey orange purple pink small large bright dark blurry
circle square triangle star cat dog house tree mountain river picture photo video
moving turning left right up down fast slowly background sky night day make it
"""
# Whatever a template adds around a prompt, for the words in it.
TEMPLATES = (
    "system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:\nuser\n\nassistant\n",
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then "
    "explain how the user's text instruction should alter or modify the image. Generate a new image that "
    "meets the user's requirements while maintaining consistency with the original input where "
    "appropriate.\n",
    "Picture 1: 2 3 4 think \n\n",
    "Describe the video by detailing the following aspects: 1. The main content and theme of the video.2. "
    "The color, shape, size, texture, quantity, text, and spatial relationships of the objects.3. Actions, "
    "events, behaviors temporal relationships, physical movement changes of the objects.4. background "
    "environment, light, style and atmosphere.5. camera angles, movements, and transitions used in the "
    "video:",
    "You are an AI that reasons about image descriptions. You give structured responses focusing on object "
    "relationships, object\nattribution and actions without speculation.",
)
CLIP_WORDS = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
QWEN_WORDS = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
    r"""|\s+(?!\S)|\s+"""
)
QWEN_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Qwen's own, as far as diffusers' pipelines use it: turns, and an empty thought when thinking is off.
LLAMA_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
GEMMA_SPECIAL = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
MISTRAL_SPECIAL = ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]")
# Mistral's, for a system message and turns whose content is a list of texts.
MISTRAL_TEMPLATE = (
    "{{- bos_token }}{%- for message in messages %}{%- set text = message.content[0].text %}"
    "{%- if message.role == 'system' %}{{- '[SYSTEM_PROMPT]' + text + '[/SYSTEM_PROMPT]' }}"
    "{%- else %}{{- '[INST]' + text + '[/INST]' }}{%- endif %}{%- endfor %}"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}{%- endif %}"
)


@cache
def _merges(pattern: str, suffix: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges of a byte-level BPE that makes one token of every word above."""
    ending = {"end_of_word_suffix": suffix} if suffix else {}
    trained = Tokenizer(BPE(**ending))
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    trained.pre_tokenizer = pre_tokenizers.Sequence([words, bytewise])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=10_000,
        min_frequency=0,
        show_progress=False,
        initial_alphabet=alphabet,
        **ending,
    )
    spaced = [f" {word}" for word in PROMPTS.split()]
    trained.train_from_iterator([*TEMPLATES, *PROMPTS.split(), *spaced], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = dict.fromkeys([*alphabet, *(letter + suffix for letter in alphabet)])
    pieces |= dict.fromkeys(sorted(model["vocab"], key=model["vocab"].get))
    return {piece: i for i, piece in enumerate(pieces)}, [tuple(pair) for pair in model["merges"]]


def clip_tokenizer(pad: str = "<|endoftext|>") -> CLIPTokenizer:
    """CLIP's tokenizer: lower case, between `<|startoftext|>` and `<|endoftext|>`, at most 77 tokens."""
    vocabulary, merges = _merges(CLIP_WORDS, "</w>")
    ends = {"<|startoftext|>": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    return CLIPTokenizer(
        vocab={**vocabulary, **ends}, merges=merges, pad_token=pad, model_max_length=CLIP_LENGTH
    )


def t5_tokenizer() -> T5Tokenizer:
    """T5's tokenizer, which also UMT5 uses: words, and letters for what is none, then `</s>`."""
    words = dict.fromkeys(PROMPTS.split())
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -3.0) for word in words]
    pieces += [(letter, -6.0) for letter in ascii_letters + digits + punctuation]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def qwen_tokenizer(**options: Any) -> Qwen2Tokenizer:
    """Qwen's tokenizer with its special tokens for turns and images, and the chat template of Qwen3."""
    vocabulary, merges = _merges(QWEN_WORDS, "")
    vocabulary = {**vocabulary, **{token: len(vocabulary) + i for i, token in enumerate(QWEN_SPECIAL)}}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        extra_special_tokens=list(QWEN_SPECIAL[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        **options,
    )


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Llama 3's tokenizer: `<|begin_of_text|>` before each text, and special tokens for turns."""
    return _bytewise_tokenizer("<|begin_of_text|>", "<|end_of_text|>", LLAMA_SPECIAL)


def mistral_tokenizer() -> PreTrainedTokenizerFast:
    """Mistral 3's tokenizer: `<s>` before each text, special tokens for turns and images, a chat template."""
    return _bytewise_tokenizer("<s>", "</s>", MISTRAL_SPECIAL, chat_template=MISTRAL_TEMPLATE)


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """Gemma 3's special tokens, `<bos>` before each text, over byte-level words."""
    return _bytewise_tokenizer("<bos>", "<eos>", GEMMA_SPECIAL)


def _bytewise_tokenizer(
    start: str, end: str, special: tuple[str, ...], **options: Any
) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of words as Qwen's that puts `start` before a text unless it is there."""
    pieces, merges = _merges(QWEN_WORDS, "")
    made = Tokenizer(BPE(vocab=pieces, merges=merges))
    made.add_special_tokens([start, end, *special])
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, made.token_to_id(start))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=start,
        eos_token=end,
        pad_token=end,
        extra_special_tokens=list(special),
        model_max_length=4096,
        **options,
    )
