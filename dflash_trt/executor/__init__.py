"""Runs one step of the network on a device."""
