"""Target families: one file each, found by its FAMILY and named after config.json's model_type."""
