"""The calls of an episode as text beside its tokens: what was asked, answered, and by which tool."""
