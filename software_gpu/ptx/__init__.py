"""PTX, executed on a CPU over the process's own memory."""
