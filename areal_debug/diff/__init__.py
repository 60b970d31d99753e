"""What `areal-debug why` prints with --all, --layers and --commits."""
