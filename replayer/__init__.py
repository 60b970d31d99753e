"""Trains from a record with no inference engine, to the same bits, and says where two runs part."""
