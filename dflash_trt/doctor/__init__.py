"""What of dflash-trt works on this machine, and with which versions: for bug reports. Nothing here fails."""
