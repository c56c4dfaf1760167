"""The trained demo pair: a target and its drafter, as Hugging Face directories."""
