"""Drafting algorithms: one file each, named as in `DraftSpec.algorithm`, with a `bind` that makes its `Drafter`."""
