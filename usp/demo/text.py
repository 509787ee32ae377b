"""The demo's text side: a word-level tokenizer in T5's manner and a tiny UMT5 encoder."""

from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from usp.demo.clips import WORDS

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
TEXT_DIM = 64


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole lower-case words that ends a text with `</s>`; other words become `<unk>`."""
    vocabulary = {word: i for i, word in enumerate((PAD, EOS, UNKNOWN, *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"\bgray\b"), "grey"),
            normalizers.Replace(Regex(r"[\W_]+"), " "),
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
            vocab_size=len(WORDS) + 3,
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
