"""The trained demo pair, a target and its drafter as Hugging Face directories, and 16 prompts held out from them."""

from pathlib import Path

PROMPTS = Path(__file__).with_name("prompts.jsonl")
