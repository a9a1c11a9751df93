"""Text to token ids and back: from a Hugging Face folder or from the vocabulary of a GGUF file."""

from jaxvllm.tokenizer.hf import Detokenizer, Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "Tokenizer", "load_tokenizer"]
