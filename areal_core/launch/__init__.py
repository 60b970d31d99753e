"""Starting processes: torchrun ranks and inference servers, with their logs, exit codes and clean ends."""
