"""One file a part of training, one function an alarm, or one row where a level is all (`thresholds.py`): windows in, alarm or None out."""
