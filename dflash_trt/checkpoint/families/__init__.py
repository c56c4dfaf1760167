"""Target families: one file each, found by its FAMILY; its name is the model_type of the family's config.json."""
