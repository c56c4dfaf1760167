"""Compiles the kernels of the plugin library ahead of time: `python -m plugins.aot OUT`, from the repository root."""
