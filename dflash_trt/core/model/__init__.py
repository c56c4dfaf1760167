"""What a target and a drafter are, as data: a model is layers, a layer is a mixer and a feed-forward of some kind.

Foreign config.json files become these in `checkpoint/`; the network reads nothing else. Bounds are far beyond any
model: what lies outside is a corrupt file, and would compute something without a word.
"""
