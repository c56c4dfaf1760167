"""A really trained tiny target and drafter, so that everything runs on a laptop."""
