"""Which requests, which pages, which K. Pure Python: no torch."""
