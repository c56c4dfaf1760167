"""The trained demo pair, target and drafter as Hugging Face directories, and 16 held-out prompts."""

from pathlib import Path

PROMPTS = Path(__file__).with_name("prompts.jsonl")
