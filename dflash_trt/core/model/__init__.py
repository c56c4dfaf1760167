"""Targets and drafters as data: a list of layers, each a mixer and a feed-forward of some kind.

`checkpoint/` reads config.json files into these specs, and the network reads nothing else. The bounds of their fields
are far beyond any real model, so that only corrupt files exceed them.
"""
