"""Vocabulary every other room speaks: errors, specs, configs, requests, batches. No torch here."""
