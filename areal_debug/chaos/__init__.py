"""`areal-debug chaos`: train behind servers that fail and send wrong replies; check every row."""
