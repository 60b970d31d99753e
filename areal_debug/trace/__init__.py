"""`areal-debug trace`: show where slow steps spent their time."""
