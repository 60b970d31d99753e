"""Other questions: equal in every bit, which of two engines is at fault, while a run trains."""
