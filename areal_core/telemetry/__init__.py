"""Stats under the names that users of AReaL know, and the loggers that write them."""
