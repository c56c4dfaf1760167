"""The vocabulary of all packages: errors, specs, configs, requests, batches. Imports torch nowhere at module level."""
