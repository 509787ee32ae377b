"""The demo's text side: a word-level tokenizer in T5's manner and a tiny UMT5 encoder."""

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from usp.demo.clips import BACKGROUNDS, WORDS

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
TEXT_DIM = 64
# "on a blue background" is one token. With separate words, "a blue circle on a green background" drew a green
# circle on blue wherever training had seen only that order: so small an encoder learns sets, not order.
PHRASES = {
    f"{name}_background": rf"\b(?:(?:(?:on|over) )?(?:(?:a|the) )?{name} background|(?:on|over) {name})\b"
    for name in BACKGROUNDS
}
VOCABULARY = (PAD, EOS, UNKNOWN, *WORDS, *PHRASES)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of lower-case words and `PHRASES` that ends a text with `</s>`; all else is `<unk>`."""
    vocabulary = {word: i for i, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"\bgray\b"), "grey"),
            normalizers.Replace(Regex(r"[\W_]+"), " "),
            *(normalizers.Replace(Regex(pattern), token) for token, pattern in PHRASES.items()),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", special_tokens=[(EOS, vocabulary[EOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, model_max_length=512
    )


def build_text_encoder() -> UMT5EncoderModel:
    """The demo's text encoder with random weights: two layers, 64 wide."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(VOCABULARY),
            d_model=TEXT_DIM,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
        )
    )
