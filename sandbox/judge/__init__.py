"""The judge: proves and times an artifact on a device. It never sees candidate Python."""
