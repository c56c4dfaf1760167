"""Report of what works on this machine, with which versions, for bug reports. Nothing here fails."""
