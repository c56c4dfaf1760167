"""Sequence mixers: one file a kind, named as the spec's `kind`; `bind` makes its `Mixer`."""
