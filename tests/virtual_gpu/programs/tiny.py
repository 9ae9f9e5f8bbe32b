"""A tiny model and tokenizer for the programs here."""

from tokenizers import Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

characters = [chr(number) for number in range(32, 127)]
vocabulary = {text: number for number, text in enumerate(["<pad>", "<eos>", *characters])}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.BPE(vocab=vocabulary, merges=[])), pad_token="<pad>", eos_token="<eos>"
)
config = LlamaConfig(
    vocab_size=len(vocabulary),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
