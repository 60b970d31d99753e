"""Record any trainer: samples as it has them, with what it does not know left unknown."""
