"""The dflash-trt command: thin, heavy imports inside commands."""
