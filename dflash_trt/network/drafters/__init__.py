"""Drafting algorithms: one file each, named as `DraftSpec.algorithm`; `bind` makes its `Drafter`."""
