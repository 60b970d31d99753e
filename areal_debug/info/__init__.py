"""`areal-debug info`: what is installed, what this machine has, and which verbs work here."""
