"""Gemma 3, text: Gemma 2 with a norm over each head of q and k. Windows and rotary bases from the config."""

from dataclasses import replace

from jaxvllm.models import gemma2, qwen3

WEIGHTS = qwen3.WEIGHTS | gemma2.WEIGHTS

STYLE = replace(gemma2.STYLE, qk_norm="head")
